"""The op `draft_layer`, a part of `draft_rows` and `draft_tree`."""
