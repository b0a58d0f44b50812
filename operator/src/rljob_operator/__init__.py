"""The RLJob operator: watches RLJobs and brings each to its end on a KubeRay cluster."""
