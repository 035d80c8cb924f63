"""From the command line to objects: flags, recipes, rules of what goes together, factories. The only package that sees `args`."""
