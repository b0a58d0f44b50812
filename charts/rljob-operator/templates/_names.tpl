{{- define "rljob-operator.fullname" -}}
{{- $name := contains .Chart.Name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) -}}
{{- default $name .Values.fullnameOverride | trunc 52 | trimSuffix "-" -}}
{{- end }}

{{/* Labels of the operator's pods and of no others. The network policies of jobs use them to admit the operator. */}}
{{- define "rljob-operator.selectorLabels" -}}
app.kubernetes.io/name: rljob-operator
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "rljob-operator.labels" -}}
{{ include "rljob-operator.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "rljob-operator.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ default .Chart.AppVersion .Values.image.tag }}
{{- end -}}
{{- end }}

{{/* Fails unless the installer has chosen which namespaces the operator watches. */}}
{{- define "rljob-operator.requireNamespaces" -}}
{{- if and .Values.watchNamespaces .Values.watchAllNamespaces }}
{{- fail "watchNamespaces and watchAllNamespaces are both set; set one of them" }}
{{- else if not (or .Values.watchNamespaces .Values.watchAllNamespaces) }}
{{- fail "neither watchNamespaces nor watchAllNamespaces is set; use for example --set 'watchNamespaces={team-a}', or for jobs in all namespaces, with a ClusterRole, --set watchAllNamespaces=true" }}
{{- end }}
{{- end }}

{{/* The user of the pods of jobs; "none" if the value is null. Helm reads numbers as floats: hence int64. */}}
{{- define "rljob-operator.runAsUser" -}}
{{- if kindIs "invalid" .Values.jobs.runAsUser }}none{{ else }}{{ int64 .Values.jobs.runAsUser }}{{ end -}}
{{- end }}

{{- define "rljob-operator.tokenKeySecret" -}}
{{- default (printf "%s-token-key" (include "rljob-operator.fullname" .)) .Values.tokenKey.existingSecret -}}
{{- end }}
