//! The node's Postgres endpoint: where it listens, the certificate it shows, and what holders are
//! told.

use std::{
    fs, io,
    net::SocketAddr,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use branchpool_gateway::{Directory, Limits, Metrics, Server};
use branchpool_tls::{Identities, InvalidName, Names, OwnAuthority, OwnError, PairError};
use snafu::{ResultExt, Snafu};

use crate::{plan::Reach, storage::Layout};

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(
        display("{source}; give another one with --gateway, or none"),
        context(false)
    )]
    Listen { source: branchpool_gateway::Error },
    #[snafu(display("--gateway-host: {source}"), context(false))]
    Name { source: InvalidName },
    #[snafu(display("{source}"), context(false))]
    Pair { source: PairError },
    #[snafu(display("{source}"), context(false))]
    Own { source: OwnError },
    #[snafu(display("the CA's certificate cannot be written to {}: {source}", path.display()))]
    Publish { path: PathBuf, source: io::Error },
    #[snafu(display("what clients are to trust cannot be read from {}: {source}", path.display()))]
    ReadAuthority { path: PathBuf, source: io::Error },
}

/// What the command line says.
#[derive(Clone, Debug)]
pub struct Options {
    pub address: SocketAddr,
    /// The name that holders connect to, and the certificate is for.
    pub host: Option<String>,
    pub certificate: Certificate,
    /// Clients without TLS are served as well.
    pub plaintext: bool,
}

/// Where the certificate comes from.
#[derive(Clone, Debug)]
pub enum Certificate {
    /// Made by the agent, with a CA of its own.
    Own,
    Files {
        certificate: PathBuf,
        key: PathBuf,
        /// What clients are to trust, if that is not the system's roots.
        authority: Option<PathBuf>,
    },
}

/// Bound to its address, and not serving yet: clients wait in the backlog.
#[derive(Debug)]
pub struct Gateway {
    server: Server,
    options: Options,
    host: String,
    /// In the run directory, where clients on the node find it.
    authority: PathBuf,
}

impl Gateway {
    /// `node`: the host's name, told to holders when the address is not one of this machine alone.
    pub async fn bind(options: Options, layout: &Layout, node: &str) -> Result<Self, Error> {
        let server = Server::bind(options.address).await?;
        let host = options.host.clone().unwrap_or_else(|| {
            if options.address.ip().is_loopback() {
                "localhost".to_owned()
            } else {
                node.to_owned()
            }
        });
        Ok(Self {
            server,
            options,
            host,
            authority: layout.authority(),
        })
    }

    pub fn address(&self) -> SocketAddr {
        self.server.local_addr()
    }

    pub fn reach(&self) -> Reach {
        let mut parameters = vec![("sslmode", "verify-full".to_owned())];
        let trusted = self.trusted();
        parameters.extend(trusted.map(|path| ("sslrootcert", path.display().to_string())));
        Reach::Gateway {
            host: self.host.clone(),
            port: self.address().port(),
            parameters,
        }
    }

    /// The certificate, now and later. What is made is kept in the state directory, so no other agent
    /// may use that.
    pub async fn identities(&self, layout: &Layout, node: &str) -> Result<Identities, Error> {
        match &self.options.certificate {
            Certificate::Files {
                certificate, key, ..
            } => Ok(branchpool_tls::follow(certificate, key).await?),
            Certificate::Own => {
                let names = Names::of_host(node, self.options.host.as_deref())?;
                let own = OwnAuthority::open(&layout.tls(), names).await?;
                let path = &self.authority;
                publish(path, &own.certificate).context(PublishSnafu { path })?;
                Ok(own.identities)
            }
        }
    }

    /// What clients are to trust; `None`: what their system trusts. Call it after `identities`.
    pub fn authority(&self) -> Result<Option<String>, Error> {
        let Some(path) = self.trusted() else {
            return Ok(None);
        };
        let read = fs::read_to_string(path).context(ReadAuthoritySnafu { path })?;
        Ok(Some(read))
    }

    fn trusted(&self) -> Option<&Path> {
        match &self.options.certificate {
            Certificate::Own => Some(&self.authority),
            Certificate::Files { authority, .. } => authority.as_deref(),
        }
    }

    /// Serves until `shutdown` is ready, then ends all clients with `57P01`.
    pub async fn serve(
        self,
        directory: Directory,
        metrics: Metrics,
        tls: Identities,
        shutdown: impl Future<Output = ()>,
    ) {
        let options = branchpool_gateway::Options {
            tls: Some(tls),
            plaintext_allowed: self.options.plaintext,
            limits: Limits::default(),
            metrics,
        };
        self.server.serve(directory, options, shutdown).await;
    }
}

/// For everybody to read, and by rename: somebody may be reading it.
fn publish(path: &Path, certificate: &str) -> io::Result<()> {
    let new = path.with_extension("new");
    fs::write(&new, certificate)?;
    fs::set_permissions(&new, fs::Permissions::from_mode(0o644))?;
    fs::rename(new, path)
}
