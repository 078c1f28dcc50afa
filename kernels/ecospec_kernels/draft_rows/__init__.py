"""The op `draft_rows`; call it through `ecospec_kernels.dispatch`."""
