"""The op `argmax_rows`."""
