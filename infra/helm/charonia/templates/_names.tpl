{{- /* Names and labels. */ -}}
{{- define "charonia.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "charonia.fullname" -}}
{{- $name := include "charonia.name" . -}}
{{- if contains $name .Release.Name -}}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{- else -}}{{ printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" }}{{- end -}}
{{- end -}}

{{- define "charonia.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}{{ default (include "charonia.fullname" .) .Values.serviceAccount.name }}{{- else -}}{{ default "default" .Values.serviceAccount.name }}{{- end -}}
{{- end -}}

{{- /* What Deployments, Services, budgets and policies select by: root, role and, for executors, pool. */ -}}
{{- define "charonia.selector" -}}
app.kubernetes.io/name: {{ include "charonia.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- with .pool }}
charonia-pool: {{ . }}
{{- end }}
{{- end -}}

{{- define "charonia.labels" -}}
{{ include "charonia.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: charonia
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- /* The image of a role: root, role, suffix. */ -}}
{{- define "charonia.image" -}}
{{- $image := .root.Values.image -}}
{{ $image.repository }}-{{ .suffix }}:{{ default (default .root.Chart.AppVersion $image.tag) (get $image.tags .role) }}
{{- end -}}

{{- /* The label charonia_release of every series of this release. */ -}}
{{- define "charonia.release" -}}
{{ .Release.Namespace }}/{{ .Release.Name }}
{{- end -}}

{{- /* A query of files/: root, file, pool and autoscaling. */ -}}
{{- define "charonia.query" -}}
{{- $query := .root.Files.Get (printf "files/%s.promql" .file) -}}
{{- $query = $query | replace "RELEASE" (include "charonia.release" .root) | replace "POOL" .pool | replace "MODELS" .autoscaling.models -}}
{{- $query = $query | replace "WINDOW" (printf "%ds" (int .autoscaling.windowSecs)) | replace "ASSUMED" (toString .autoscaling.assumedSecs) -}}
{{- regexReplaceAll "\\s+" $query " " | trim -}}
{{- end -}}

{{- /* The values of a pool over those of executorDefaults, as YAML: root, pool. */ -}}
{{- define "charonia.pool" -}}
{{- mergeOverwrite (deepCopy .root.Values.executorDefaults) (deepCopy (default dict (get .root.Values.executorPools .pool))) | toYaml -}}
{{- end -}}
