"""The op `expert_mlp`; call it through `ecospec_kernels.dispatch`."""
