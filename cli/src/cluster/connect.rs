//! Which cluster, and which namespace in it: as kubectl decides.

use kube::{
    Api, Client, Config, Resource,
    config::{KubeConfigOptions, Kubeconfig},
    core::NamespaceResourceScope,
};

use super::error::{ClusterError, ConfigSnafu, failed};
use crate::args::{Global, PoolArg};
use crate::error::{CliError, UsageSnafu};

/// A cluster, and the part of it that was asked for.
pub(super) struct Cluster {
    pub(super) client: Client,
    /// Of objects that are named.
    pub(super) namespace: String,
    /// Lists show all of them.
    pub(super) all_namespaces: bool,
}

impl Cluster {
    pub(super) async fn connect(global: &Global) -> Result<Self, ClusterError> {
        let config = config(global)
            .await
            .map_err(|message| ConfigSnafu { message }.build())?;
        let namespace = global
            .namespace
            .clone()
            .unwrap_or_else(|| config.default_namespace.clone());
        Ok(Self {
            client: Client::try_from(config).map_err(failed("connect"))?,
            namespace,
            all_namespaces: global.all_namespaces,
        })
    }

    pub(super) fn api<K>(&self, namespace: &str) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    {
        Api::namespaced(self.client.clone(), namespace)
    }

    pub(super) fn listed<K>(&self) -> Api<K>
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>,
    {
        if self.all_namespaces {
            Api::all(self.client.clone())
        } else {
            self.api(&self.namespace)
        }
    }

    /// Namespace and name of a pool as it was typed.
    pub(super) fn pool(
        &self,
        pool: &PoolArg,
        global: &Global,
    ) -> Result<(String, String), CliError> {
        let name = pool
            .resolve(global.namespace.as_deref(), &self.namespace)
            .map_err(|message| UsageSnafu { message }.build())?;
        Ok((name.namespace, name.name))
    }
}

async fn config(global: &Global) -> Result<Config, String> {
    let options = KubeConfigOptions {
        context: global.context.clone(),
        ..KubeConfigOptions::default()
    };
    if let Some(file) = &global.kubeconfig {
        let kubeconfig = Kubeconfig::read_from(file).map_err(|error| chain(&error))?;
        let config = Config::from_custom_kubeconfig(kubeconfig, &options).await;
        return config.map_err(|error| chain(&error));
    }
    match Config::from_kubeconfig(&options).await {
        Ok(config) => Ok(config),
        // In a Pod, by its service account.
        Err(_)
            if options.context.is_none()
                && std::env::var_os("KUBERNETES_SERVICE_HOST").is_some() =>
        {
            Config::incluster().map_err(|error| chain(&error))
        }
        Err(error) => Err(chain(&error)),
    }
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        next = cause.source();
    }
    text
}
