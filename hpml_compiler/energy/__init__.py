"""Energy of the devices of this machine, measured where there is a meter."""
