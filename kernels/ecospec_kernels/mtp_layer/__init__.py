"""The op `mtp_layer`; call it through `ecospec_kernels.dispatch`."""
