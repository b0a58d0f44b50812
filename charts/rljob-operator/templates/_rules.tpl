{{/*
The operator's permissions in the namespaces of jobs. It creates Secrets but never reads them, so it has no permission
to read Secrets. The garbage collector deletes everything that a job owns, so the operator needs to delete only Ray
clusters, and finished jobs after `ttlSecondsAfterFinished`.
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
# Some problems are only in events: a volume that cannot be mounted, or a RayCluster that KubeRay rejects.
- apiGroups: [""]
  resources: [events]
  verbs: [list]
- apiGroups: [""]
  resources: [secrets]
  verbs: [create]
{{- if .Values.jobs.networkPolicy.enabled }}
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [list, create, patch]
{{- end }}
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
{{- if .Values.kueue.enabled }}
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [list, watch]
{{- end }}
{{- end }}
