"""The op `draft_propose`, a part of `draft_tree`."""
