//! Why there are no agents: a namespace that refuses their Pods refuses them in silence.

use k8s_openapi::api::core::v1::Namespace;
use kube::{Api, ResourceExt};

use super::{Controller, Notice};
use crate::{
    clock,
    index::Index,
    plan::{Millis, SECOND},
};

const ENFORCED: &str = "pod-security.kubernetes.io/enforce";
const ASK_EVERY: Millis = 30 * SECOND;

#[derive(Debug, Default)]
pub(super) struct NoAgents {
    why: Option<(&'static str, String)>,
    ask_at: Millis,
}

impl NoAgents {
    pub(super) fn answered(&mut self, why: Option<(&'static str, String)>) {
        self.why = why;
    }

    pub(super) fn why(&self) -> Option<(&str, &str)> {
        self.why
            .as_ref()
            .map(|(reason, message)| (*reason, &**message))
    }
}

impl Controller {
    /// Looks at the agents' namespace while there are none.
    pub(super) fn look_for_agents(&mut self, index: &Index) {
        if !index.agents.is_empty() {
            self.no_agents.why = None;
            return;
        }
        let now = clock::now();
        if now < self.no_agents.ask_at {
            return;
        }
        self.no_agents.ask_at = now + ASK_EVERY;
        let (client, notices) = (self.cluster.client(), self.notices.clone());
        let name = self.agent_namespace.clone();
        tokio::spawn(async move {
            let api: Api<Namespace> = Api::all(client);
            let why = match api.get_opt(&name).await {
                Ok(Some(found)) => refuses_agents(&name, &found),
                Ok(None) => Some((
                    "NoAgents",
                    format!(
                        "there is no namespace {name} for the agents: install the chart with agents"
                    ),
                )),
                // Without leave to look, the general sentence has to do.
                Err(_) => None,
            };
            let _stopped = notices.send(Notice::AgentNamespace(why)).await;
        });
    }
}

fn refuses_agents(name: &str, namespace: &Namespace) -> Option<(&'static str, String)> {
    let level = namespace.labels().get(ENFORCED)?;
    (level != "privileged").then(|| {
        (
            "PodSecurity",
            format!(
                "namespace {name} enforces the Pod Security level {level}, which refuses the agents' Pods: kubectl label namespace {name} {ENFORCED}=privileged --overwrite"
            ),
        )
    })
}
