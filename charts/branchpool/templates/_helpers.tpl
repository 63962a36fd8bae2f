{{- define "branchpool.fullname" -}}
{{- .Values.fullnameOverride | default .Release.Name | trunc 45 | trimSuffix "-" -}}
{{- end -}}

{{- define "branchpool.operator" -}}{{ include "branchpool.fullname" . }}-operator{{- end -}}
{{- define "branchpool.agent" -}}{{ include "branchpool.fullname" . }}-agent{{- end -}}

{{/* Labels that say what an object belongs to; they never change, so selectors may use them. */}}
{{- define "branchpool.selector" -}}
app.kubernetes.io/component: {{ .component }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/name: branchpool
{{- end -}}

{{- define "branchpool.labels" -}}
{{ include "branchpool.selector" . }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: branchpool
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Of Pods: a label that changes with the chart's version would restart agents, and with them every server. */}}
{{- define "branchpool.podLabels" -}}
{{ include "branchpool.selector" . }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Reference of an image: (dict "root" $ "image" .Values.agent.image) */}}
{{- define "branchpool.image" -}}
{{- $registry := .root.Values.image.registry | trimSuffix "/" -}}
{{- $repository := .image.repository -}}
{{- if $registry -}}{{- $repository = printf "%s/%s" $registry $repository -}}{{- end -}}
{{- if .image.digest -}}
{{ $repository }}@{{ .image.digest }}
{{- else -}}
{{ $repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "branchpool.pullSecrets" -}}
{{- with .Values.image.pullSecrets -}}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end -}}
{{- end -}}

{{/* Secret with the gateway's certificate; empty when each agent has one of its own CA. */}}
{{- define "branchpool.gatewaySecret" -}}
{{- $tls := .Values.agent.gateway.tls -}}
{{- if $tls.secretName -}}
{{ $tls.secretName }}
{{- else if $tls.certManager.enabled -}}
{{ include "branchpool.fullname" . }}-gateway
{{- end -}}
{{- end -}}

{{/* What the schema cannot say. */}}
{{- define "branchpool.check" -}}
{{- if eq .Values.agent.namespace .Release.Namespace -}}
{{- fail (printf "agent.namespace must not be the release's namespace %s: agents are privileged and need a namespace of their own" .Release.Namespace) -}}
{{- end -}}
{{- if has .Values.agent.namespace .Values.watchNamespaces -}}
{{- fail (printf "watchNamespaces must not name the agents' namespace %s: who may create Pods there is root on the nodes" .Values.agent.namespace) -}}
{{- end -}}
{{- if gt (.Values.operator.podDisruptionBudget.minAvailable | int) (sub (.Values.operator.replicas | int) 1 | int) -}}
{{- if and .Values.operator.podDisruptionBudget.enabled (gt (.Values.operator.replicas | int) 1) -}}
{{- fail (printf "operator.podDisruptionBudget.minAvailable must be less than operator.replicas (%d), or no node with a replica could be drained" (.Values.operator.replicas | int)) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "branchpool.dnsEgress" -}}
- ports:
    - port: 53
      protocol: UDP
    - port: 53
      protocol: TCP
{{- end -}}

{{/* Binds a Role to the operator: (dict "root" $ "namespace" … "name" …) */}}
{{- define "branchpool.roleBinding" -}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: {{ .name }}
  namespace: {{ .namespace }}
  labels:
    {{- include "branchpool.labels" (dict "root" .root "component" "operator") | nindent 4 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: Role
  name: {{ .name }}
subjects:
  - kind: ServiceAccount
    name: {{ include "branchpool.operator" .root }}
    namespace: {{ .root.Release.Namespace }}
{{- end -}}

{{/* Annotations of an object that exists while `helm test` runs; lower weights come first. */}}
{{- define "branchpool.testHook" -}}
helm.sh/hook: test
helm.sh/hook-weight: {{ . | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end -}}
