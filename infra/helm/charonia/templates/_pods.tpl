{{- /* What pods of all roles share. */ -}}

{{- /* Variables that say where the log is: root, role. Each is an option of the program. */ -}}
{{- define "charonia.logEnvironment" -}}
{{- $log := .root.Values.log -}}
{{- $operator := $log.operator -}}
- name: CHARONIA_LOG_URL
{{- if $operator.enabled }}
  value: redis+sentinel://rfs-{{ include "charonia.fullname" .root }}:26379/mymaster/0
{{- else if $log.urlSecret.name }}
  valueFrom:
    secretKeyRef:
      name: {{ $log.urlSecret.name }}
      key: {{ $log.urlSecret.key }}
{{- else }}
  value: {{ required "log.url, log.urlSecret.name or log.operator.enabled is needed" $log.url | replace "{role}" (ternary "operator" .role (eq .role "console")) | quote }}
{{- end }}
{{- if or $log.passwordSecret.name (and $operator.enabled $operator.passwordSecret) }}
- name: CHARONIA_LOG_PASSWORD_FILE
  value: /run/secrets/charonia/log/password
{{- end }}
{{- if $log.requireSecure }}
- name: CHARONIA_REQUIRE_SECURE_LOG
  value: "true"
{{- end }}
{{- end -}}

{{- /* Variables of every part that has a lease in the log: root, role. */ -}}
{{- define "charonia.environment" -}}
{{ include "charonia.logEnvironment" . }}
- name: CHARONIA_EXIT_TIMEOUT_SECS
  value: {{ .root.Values.exitTimeoutSecs | quote }}
- name: {{ if eq .role "gateway" }}CHARONIA_GATEWAY_HEARTBEAT_TTL_SECS{{ else }}CHARONIA_HEARTBEAT_TTL_SECS{{ end }}
  value: {{ .root.Values.heartbeatTtlSecs | quote }}
- name: CHARONIA_METRICS_ADDRESS
  value: 0.0.0.0
- name: CHARONIA_METRICS_PORT
  value: "8002"
{{- end -}}

{{- /* Variables that the values add: env (a map). */ -}}
{{- define "charonia.moreEnvironment" -}}
{{- range $name, $value := . }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end -}}

{{- define "charonia.mounts" -}}
{{- $log := .root.Values.log -}}
- name: tmp
  mountPath: /tmp
{{- if or $log.passwordSecret.name (and $log.operator.enabled $log.operator.passwordSecret) }}
- name: log-password
  mountPath: /run/secrets/charonia/log
  readOnly: true
{{- end }}
{{- if $log.tlsSecret }}
- name: log-tls
  mountPath: /run/secrets/charonia/tls
  readOnly: true
{{- end }}
{{- end -}}

{{- define "charonia.volumes" -}}
{{- $log := .root.Values.log -}}
- name: tmp
  emptyDir:
    sizeLimit: {{ .root.Values.tmpSize }}
{{- if and $log.operator.enabled $log.operator.passwordSecret }}
- name: log-password
  secret:
    secretName: {{ $log.operator.passwordSecret }}
    defaultMode: 0440
    items: [{key: password, path: password}]
{{- else if $log.passwordSecret.name }}
- name: log-password
  secret:
    secretName: {{ $log.passwordSecret.name }}
    defaultMode: 0440
    items: [{key: {{ get $log.passwordSecret.keys .role }}, path: password}]
{{- end }}
{{- if $log.tlsSecret }}
- name: log-tls
  secret:
    secretName: {{ $log.tlsSecret }}
    defaultMode: 0440
{{- end }}
{{- end -}}

{{- define "charonia.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- /* Fields of a pod's spec before its containers: root, role, pool, values, graceSecs. */ -}}
{{- define "charonia.podSpec" -}}
{{- $root := .root -}}
serviceAccountName: {{ include "charonia.serviceAccount" $root }}
automountServiceAccountToken: false
# a Service named `…-metrics` would otherwise set CHARONIA_METRICS_PORT
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .graceSecs }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $root.Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: topology.kubernetes.io/zone
    whenUnsatisfiable: {{ $root.Values.topologySpread.zone }}
    labelSelector:
      matchLabels:
        {{- include "charonia.selector" (dict "root" $root "role" .role "pool" .pool) | nindent 8 }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: {{ $root.Values.topologySpread.host }}
    labelSelector:
      matchLabels:
        {{- include "charonia.selector" (dict "root" $root "role" .role "pool" .pool) | nindent 8 }}
{{- end -}}

{{- /* Labels and annotations of a pod: root, role, pool. */ -}}
{{- define "charonia.podMetadata" -}}
labels:
  {{- include "charonia.labels" . | nindent 2 }}
  {{- with .root.Values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .root.Values.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* A part without a front says on its metrics port, or the one named, how it is: startupSecs, port. What it waits for, as the log, is no reason to
       restart it: readiness alone holds up a roll. */ -}}
{{- define "charonia.healthProbes" -}}
startupProbe:
  httpGet: {path: /health/live, port: {{ default "metrics" .port }}}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: {{ div (int .startupSecs) 2 }}
readinessProbe:
  httpGet: {path: /health/ready, port: {{ default "metrics" .port }}}
  periodSeconds: 2
  timeoutSeconds: 5
livenessProbe:
  httpGet: {path: /health/live, port: {{ default "metrics" .port }}}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: 6
{{- end -}}
