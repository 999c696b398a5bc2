"""The hardware that a plan is for: devices, links, clusters, and meshes of their devices."""
