"""hpml: plan and run a model over many devices by changing one line, `torch.compile(model, backend="hpml")`."""
