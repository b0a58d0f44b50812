"""The RLJob operator: watches RLJobs and runs each of them on a Ray cluster that KubeRay creates."""
