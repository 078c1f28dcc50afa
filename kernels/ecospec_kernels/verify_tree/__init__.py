"""The op `verify_tree`."""
