"""The experiments of a plan, their logs, and the pictures and tables drawn from them."""
