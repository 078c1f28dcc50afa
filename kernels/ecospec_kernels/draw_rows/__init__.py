"""The op `draw_rows`."""
