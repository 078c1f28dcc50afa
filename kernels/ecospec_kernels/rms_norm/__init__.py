"""The op `rms_norm`; call it through `ecospec_kernels.dispatch`."""
