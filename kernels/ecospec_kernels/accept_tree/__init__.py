"""The op `accept_tree`; call it through `ecospec_kernels.dispatch`."""
