{{/* What the schema cannot say, or not in words that help. */}}
{{- define "triton-openai.checkValues" -}}
{{- $secret := "settings are in a ConfigMap, which is no place for secrets" }}
{{- $elsewhere := dict
  "access.api_key" (printf "%s: put the keys into the Secret that apiKeys.existingSecret names" $secret)
  "access.openai_restricted_api" (printf "%s: set TRITON_OPENAI_OPENAI_RESTRICTED_API from a Secret in extraEnvFrom" $secret)
  "server.enable_kserve_frontends" "it is for a Triton in the same container: set mode to sidecar, and kserve.enabled"
  "server.host" "the chart sets it"
  "server.log_format" "set logFormat"
  "server.port" "the chart sets it; the port of the Service is service.port"
  "server.shutdown_delay" "set shutdown.noticeSeconds"
  "server.shutdown_grace" "set shutdown.graceSeconds"
  "tls.certificate" "the probes would not use HTTPS: set tls.existingSecret"
  "triton.model_repository" "set mode to sidecar, and triton.modelRepository"
  "triton.url" "set triton.urls"
}}
{{- range $path, $instead := $elsewhere }}
{{- $keys := splitList "." $path }}
{{- if hasKey (default dict (get $.Values.settings (first $keys))) (last $keys) }}
{{- fail (printf "settings.%s is not accepted: %s." $path $instead) }}
{{- end }}
{{- end }}
{{- $headers := get (default dict (get .Values.settings "triton_access")) "headers" }}
{{- range kindIs "string" $headers | ternary (list $headers) $headers }}
{{- if regexMatch "(?i)^(proxy-)?authorization *:" . }}
{{- fail (printf "settings.triton_access.headers is not accepted with credentials: %s: name a Secret in triton.token." $secret) }}
{{- end }}
{{- end }}
{{- with .Values.triton.modelRepository }}
{{- if and (include "triton-openai.sidecar" $) (eq (empty .volume) (empty .url)) }}
{{- fail "mode sidecar needs either triton.modelRepository.volume or triton.modelRepository.url." }}
{{- end }}
{{- end }}
{{- if and (include "triton-openai.several" .) (include "triton-openai.sidecar" .) }}
{{- fail "settings.triton.endpoints needs mode standalone: the sidecar is in front of the Triton in its pod." }}
{{- end }}
{{- if and .Values.kserve.enabled (not (include "triton-openai.sidecar" .)) }}
{{- fail "kserve.enabled needs mode sidecar: clients reach another Triton at its own Service." }}
{{- end }}
{{- if and .Values.tracing.tritonEndpoint (not (include "triton-openai.sidecar" .)) }}
{{- fail "tracing.tritonEndpoint needs mode sidecar: another Triton gets its collector by its own --trace-config option." }}
{{- end }}
{{- with .Values.autoscaling }}
{{- if and .enabled (not (or .requestsInFlight .cpuUtilization)) }}
{{- fail "autoscaling needs requestsInFlight or cpuUtilization." }}
{{- end }}
{{- end }}
{{- $several := or .Values.autoscaling.enabled (gt (int .Values.replicaCount) 1) }}
{{- $store := default "dir" (get (default dict (get .Values.settings "files")) "store") }}
{{- $bucket := hasPrefix "s3:" $store }}
{{- with .Values.persistence }}
{{- if hasPrefix "postgres" (default "" (get (default dict (get $.Values.settings "batches")) "store")) }}
{{- fail (printf "settings.batches.store is not accepted with PostgreSQL: %s: name a Secret in persistence.postgresql." $secret) }}
{{- end }}
{{- if .postgresql.existingSecret }}
{{- if not $bucket }}
{{- fail "persistence.postgresql needs settings.files.store s3://BUCKET: replicas share files in a bucket. Without persistence.postgresql, one replica has files on its volume." }}
{{- end }}
{{- if and $several .enabled }}
{{- fail "persistence.enabled needs replicaCount 1 and no autoscaling: replicas share no volume, and with persistence.postgresql and settings.files.store s3://BUCKET they need none." }}
{{- end }}
{{- else if and $several (or .enabled $bucket) }}
{{- fail "persistence needs replicaCount 1 and no autoscaling, or persistence.postgresql: each replica would have files and batches of its own, and only some requests for them would find them." }}
{{- else if and $bucket (not .enabled) }}
{{- fail "settings.files.store s3://BUCKET needs persistence.postgresql, or persistence.enabled and replicaCount 1: the state of files and batches would be lost with the pod." }}
{{- end }}
{{- end }}
{{- if and .Values.service.nodePort (eq .Values.service.type "ClusterIP") }}
{{- fail "service.nodePort needs service.type NodePort or LoadBalancer." }}
{{- end }}
{{- if and .Values.ingress.enabled (not .Values.ingress.hosts) }}
{{- fail "ingress needs hosts." }}
{{- end }}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) }}
{{- fail "httpRoute needs parentRefs: the Gateway that it belongs to." }}
{{- end }}
{{- end }}
