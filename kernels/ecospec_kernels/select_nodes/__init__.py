"""The op `select_nodes`."""
