"""The op `few_row_linear`; call it through `ecospec_kernels.dispatch`."""
