"""The op `group_router`; call it through `ecospec_kernels.dispatch`."""
