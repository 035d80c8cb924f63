"""From the command line to objects; the only package that sees `args`."""
