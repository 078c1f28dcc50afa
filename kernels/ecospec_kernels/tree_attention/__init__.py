"""The op `tree_attention`; call it through `ecospec_kernels.dispatch`."""
