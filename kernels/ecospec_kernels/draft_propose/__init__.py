"""The op `draft_propose`; call it through `ecospec_kernels.dispatch`."""
