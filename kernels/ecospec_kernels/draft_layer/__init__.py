"""The op `draft_layer`; call it through `ecospec_kernels.dispatch`."""
