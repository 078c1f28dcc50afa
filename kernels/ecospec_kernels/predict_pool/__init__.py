"""The op `predict_pool`; call it through `ecospec_kernels.dispatch`."""
