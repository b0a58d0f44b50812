{{/*
What the operator may do in the namespaces of jobs. Secrets it makes and never reads, and what a job owns is removed by
the garbage collector: so there is neither a verb to read secrets nor one to delete anything but clusters, and jobs
whose time after their end is over.
*/}}
{{- define "rljob-operator.rules" -}}
- apiGroups: [rljob.dev]
  resources: [rljobs]
  verbs: [get, list, watch, delete]
- apiGroups: [rljob.dev]
  resources: [rljobs/status]
  verbs: [patch]
- apiGroups: [ray.io]
  resources: [rayclusters]
  verbs: [get, list, watch, create, delete]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
# Why a pod has no container, or KubeRay no pod, stands in events only.
- apiGroups: [""]
  resources: [events]
  verbs: [list]
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [create, patch]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
{{- end }}
