"""The op `draft_tree`; call it through `ecospec_kernels.dispatch`."""
