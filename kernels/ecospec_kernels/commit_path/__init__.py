"""The op `commit_path`."""
