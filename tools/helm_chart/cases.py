"""The matrix of values that the chart is rendered for, and values that it has to refuse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Case:
    """`kept`: the manifests are in the repository, so that tests read them without Helm."""

    values: dict[str, Any]
    kept: bool = True


_LOG = {"url": "redis://{role}@redis:6379/0"}
_SIGNING = {"signingSecret": {"name": "charonia-webhooks"}}

CASES: dict[str, Case] = {
    "small": Case(
        {
            "log": _LOG,
            "webhooks": {"enabled": False},
            "executorPools": {"cpu": {"models": {"claim": "models"}}},
        }
    ),
    "gpu-keda": Case(
        {
            "image": {"repository": "registry.example/charonia", "tag": "1.2.3", "tags": {"executor": "1.2.4"}},
            "imagePullSecrets": [{"name": "registry"}],
            "log": {
                "url": "rediss://{role}@redis:6379/0?ssl_ca_certs=/run/secrets/charonia/tls/ca.crt",
                "passwordSecret": {"name": "charonia-log"},
                "tlsSecret": "redis-ca",
                "requireSecure": True,
            },
            "gateways": {"apiKeysSecret": {"name": "tenants"}, "env": {"CHARONIA_HTTP_THREAD_COUNT": 4}},
            "webhooks": _SIGNING | {"allow": ["hooks.example", "10.1.0.0/16"]},
            "console": {"enabled": True, "actions": True, "names": ["console.example"]},
            "executorDefaults": {"models": {"claim": "models", "subPath": "production"}},
            "executorPools": {
                "cpu": {"labels": {"zone": "a", "disk": "nvme"}, "maxLoadedModels": 20},
                "gpu": {
                    "image": "executor-gpu",
                    "gpus": {"count": 1},
                    "replacing": "free",
                    "runtimeClassName": "nvidia",
                    "nodeSelector": {"accelerator": "h100"},
                    "tolerations": [{"key": "team", "operator": "Equal", "value": "ml", "effect": "NoSchedule"}],
                    "memoryBudget": "40GiB",
                    "autoscaling": {
                        "kind": "keda",
                        "minReplicas": 0,
                        "maxReplicas": 8,
                        "busyInstances": 0.7,
                        "models": "ocr_.+|identity",
                    },
                },
            },
            "prometheus": {"serviceMonitor": {"enabled": True, "labels": {"release": "monitoring"}}},
            "networkPolicy": {
                "log": [{"podSelector": {"matchLabels": {"app": "redis"}}}],
                "metrics": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
                "console": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress"}}}],
                "webhooksEgress": [{"ports": [{"port": 443, "protocol": "TCP"}]}],
            },
            "topologySpread": {"zone": "DoNotSchedule"},
        }
    ),
    "operator-hpa": Case(
        {
            "log": {
                "operator": {
                    "enabled": True,
                    "passwordSecret": "charonia-log",
                    "storage": {"size": "20Gi", "storageClassName": "fast"},
                }
            },
            "exitTimeoutSecs": 90,
            "gateways": {
                "durability": "replicated:1",
                "preStopSecs": 15,
                "drainDelaySecs": 2.5,
                "autoscaling": {"enabled": True},
                "openai": {"enabled": True},
                "traceConfig": ["opentelemetry,url=http://otel-collector:4318/v1/traces", "level=OFF"],
                "service": {"type": "LoadBalancer", "annotations": {"example.com/internal": "true"}},
            },
            "webhooks": _SIGNING | {"replicas": 2},
            "console": {"enabled": True},
            "serviceAccount": {"annotations": {"iam.example/role": "models"}},
            "executorPools": {
                "default": {
                    "models": {
                        "url": "s3://bucket/models",
                        "credentialsSecret": "bucket",
                        "controlMode": "poll",
                        "pollSecs": 60,
                    },
                    "autoscaling": {"kind": "hpa", "cpuUtilization": 80},
                },
                "llm": {
                    "image": "executor-llm",
                    "models": {"claim": "texts"},
                    "env": {"CHARONIA_BACKEND_CONFIG": "llm,charonia.conversions=/conversions"},
                    "volumes": [{"name": "conversions", "emptyDir": {}}],
                    "volumeMounts": [{"name": "conversions", "mountPath": "/conversions"}],
                },
            },
            "networkPolicy": {"executorEgress": [{"ports": [{"port": 443, "protocol": "TCP"}]}]},
            "prometheus": {"rules": {"enabled": True, "alerts": False}},
        }
    ),
    "kserve": Case(
        {
            "log": {"urlSecret": {"name": "log"}},
            "webhooks": {"enabled": False},
            "serviceAccount": {"create": False, "name": "serving"},
            "executorPools": {"cpu": {}, "spare": {"enabled": False}},
            "executorDefaults": {"models": {"claim": "models"}},
            "networkPolicy": {"enabled": False},
            "kserve": {"enabled": True, "env": {"CHARONIA_EXECUTORS": 2}},
            "podAnnotations": {"example.com/team": "ml"},
            "priorityClassName": "serving",
        }
    ),
    "alerts": Case(
        {
            "log": _LOG,
            "webhooks": _SIGNING,
            "executorPools": {"cpu": {"models": {"claim": "models"}}},
            "prometheus": {"rules": {"enabled": True, "labels": {"release": "monitoring"}}},
            "gateways": {"preStopSecs": 0},
        },
        kept=False,
    ),
}

_GOOD = CASES["small"].values
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no log": (_GOOD | {"log": {}}, "log.url, log.urlSecret.name or log.operator.enabled is needed"),
    "an unknown value": (_GOOD | {"replicas": 3}, "additional properties 'replicas' not allowed"),
    "an unknown value of a pool": (
        _GOOD | {"executorPools": {"cpu": {"gpu": 1}}},
        "additional properties 'gpu' not allowed",
    ),
    "a pool without models": (_GOOD | {"executorPools": {"cpu": {}}}, "executorPools.cpu.models: give claim or url"),
    "two sources of models": (
        _GOOD | {"executorPools": {"cpu": {"models": {"claim": "a", "url": "s3://b/c"}}}},
        "give claim or url, not both",
    ),
    "webhooks without secrets": (_GOOD | {"webhooks": {"enabled": True}}, "webhooks.signingSecret.name is needed"),
    "an HPA of none": (
        _GOOD
        | {"executorPools": {"cpu": {"models": {"claim": "a"}, "autoscaling": {"kind": "hpa", "minReplicas": 0}}}},
        "an HPA needs 1 or more",
    ),
    "scaling by nothing": (
        _GOOD
        | {"executorPools": {"cpu": {"models": {"claim": "a"}, "autoscaling": {"kind": "keda", "queuedSecs": 0}}}},
        "queuedSecs",
    ),
    "a level of durability that is none": (
        _GOOD | {"gateways": {"durability": "disk"}},
        "does not match pattern",
    ),
    "a name of a pool that no Deployment can have": (
        _GOOD | {"executorPools": {"GPU": {"models": {"claim": "a"}}}},
        "GPU",
    ),
}
"""Values, and words of the refusal."""
