{{- define "triton-openai.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "triton-openai.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else if contains (include "triton-openai.name" .) .Release.Name }}
{{- .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "triton-openai.name" .) | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "triton-openai.selectorLabels" -}}
app.kubernetes.io/name: {{ include "triton-openai.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* Other than those that select the release's own pods. */}}
{{- define "triton-openai.testLabels" -}}
app.kubernetes.io/name: {{ include "triton-openai.name" . }}-test
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "triton-openai.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "triton-openai.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "triton-openai.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "triton-openai.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{/* An image: takes its values, and the tag where they have none. */}}
{{- define "triton-openai.image" -}}
{{- if .image.digest }}
{{- printf "%s@%s" .image.repository .image.digest }}
{{- else }}
{{- printf "%s:%s" .image.repository (default .tag .image.tag) }}
{{- end }}
{{- end }}

{{- define "triton-openai.scheme" -}}
{{- if .Values.tls.existingSecret }}HTTPS{{ else }}HTTP{{ end }}
{{- end }}

{{- define "triton-openai.sidecar" -}}
{{- if eq .Values.mode "sidecar" }}true{{ end }}
{{- end }}

{{/* What is asked for health: takes the context and the path. Kubernetes itself has no certificate to show. */}}
{{- define "triton-openai.probe" -}}
{{- if .context.Values.tls.clientCertificates -}}
exec:
  command: [/opt/triton-openai/bin/python, /opt/triton-openai/healthcheck.py, {{ .path }}]
{{- else -}}
httpGet:
  path: {{ .path }}
  port: http
  scheme: {{ include "triton-openai.scheme" .context }}
{{- end }}
{{- end }}

{{/* Whether the settings name several Tritons, in place of triton.urls. */}}
{{- define "triton-openai.several" -}}
{{- $triton := default dict (get .Values.settings "triton") }}
{{- if or (get $triton "endpoints") (get $triton "endpoints_file") }}true{{ end }}
{{- end }}

{{/* Whether files and batches are kept, here or elsewhere. */}}
{{- define "triton-openai.keeps" -}}
{{- with .Values.persistence }}
{{- if or .enabled .postgresql.existingSecret }}true{{ end }}
{{- end }}
{{- end }}

{{/* Triton's ports: those that are named, else those of its addresses. */}}
{{- define "triton-openai.tritonPorts" -}}
{{- $ports := .Values.networkPolicy.tritonPorts }}
{{- if not $ports }}
{{- $urls := .Values.triton.urls }}
{{- if include "triton-openai.several" . }}
{{- $urls = list }}
{{- range (get .Values.settings "triton").endpoints }}
{{- if kindIs "string" . }}
{{- $urls = concat $urls (regexFindAll "(https?|grpcs?)://[^+]+" . -1) }}
{{- else }}
{{- $urls = concat $urls .url }}
{{- end }}
{{- end }}
{{- end }}
{{- range $urls }}
{{- $url := urlParse . }}
{{- $port := regexFind "[0-9]+$" (regexFind ":[0-9]+$" $url.host) }}
{{- $ports = append $ports (int (default (ternary "443" "80" (hasSuffix "s" $url.scheme)) $port)) }}
{{- end }}
{{- end }}
{{- $ports | uniq | toJson }}
{{- end }}

{{/* Where the service finds Triton. */}}
{{- define "triton-openai.tritonUrl" -}}
{{- if include "triton-openai.sidecar" . -}}
http://127.0.0.1:8000,grpc://127.0.0.1:8001
{{- else -}}
{{- join "," .Values.triton.urls }}
{{- end }}
{{- end }}

{{/* Both delays, the service's grace, what its workers get beyond that, Triton's time, and some for Kubernetes itself. */}}
{{- define "triton-openai.terminationGracePeriod" -}}
{{- $seconds := add .Values.shutdown.delaySeconds .Values.shutdown.noticeSeconds .Values.shutdown.graceSeconds 15 }}
{{- if include "triton-openai.sidecar" . }}
{{- $seconds = add $seconds .Values.shutdown.tritonSeconds }}
{{- end }}
{{- $seconds }}
{{- end }}

{{- define "triton-openai.huggingFaceToken" -}}
{{- with .Values.huggingFaceToken }}
{{- if .existingSecret -}}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .existingSecret }}
      key: {{ .key }}
{{- end }}
{{- end }}
{{- end }}
