"""EcoSpec training side: harvest traces, fit the predictor, profile the device, tune the policy, export the bundle."""
