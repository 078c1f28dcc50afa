"""The op `latent_attention`; call it through `ecospec_kernels.dispatch`."""
