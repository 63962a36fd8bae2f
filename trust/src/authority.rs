//! The operator's CA: what it signs, and how it is kept and replaced.

use std::{collections::BTreeMap, sync::Arc};

use branchpool_tls::ca::{self, Ca, Leaf, Usage};
use rcgen::{CidrSubnet, GeneralSubtree, KeyPair, NameConstraints, PublicKeyData, SanType};
use rustls::pki_types::{CertificateDer, pem::PemObject};
use snafu::{OptionExt, ResultExt, Snafu, ensure};
use time::{Duration, OffsetDateTime};

use crate::{
    Bundle, BundleError, CsrError, Fingerprint, InvalidNode, OPERATOR_NAME, agent_name, csr,
    identity::{Identity, validity},
    plan::{CaFacts, Rotation, Step},
};

const CA_TERM: Duration = Duration::days(5 * 365);
/// Revocation is not needed for what lasts a day.
const LEAF_TERM: Duration = Duration::hours(24);

/// Entries of the Secret.
const CERTIFICATE: &str = "ca.crt";
const KEY: &str = "ca.key";
const NEXT_CERTIFICATE: &str = "next.crt";
const NEXT_KEY: &str = "next.key";
const OLD_CERTIFICATE: &str = "old.crt";

#[derive(Debug, Snafu)]
pub enum Error {
    #[snafu(display(
        "the entry {entry} is missing; put it back, or delete the whole Secret for a new CA"
    ))]
    Missing { entry: &'static str },

    #[snafu(display(
        "{entry} and the key beside it cannot be used ({source}); put them back, or delete the whole Secret for a new CA"
    ))]
    Unusable {
        entry: &'static str,
        source: ca::Error,
    },

    #[snafu(display(
        "{entry} is no certificate in PEM; put it back, or delete the whole Secret for a new CA"
    ))]
    NotPem { entry: &'static str },

    #[snafu(display(
        "there are both {NEXT_CERTIFICATE} and {OLD_CERTIFICATE}, and a CA is replaced by one at a time; remove the one that is not in use"
    ))]
    TwoAtOnce,

    #[snafu(display("the CA's certificates make no bundle: {source}"))]
    InBundle { source: BundleError },

    #[snafu(display("a certificate could not be made: {source}"))]
    Issue { source: ca::Error },

    #[snafu(display("a key could not be made: {source}"))]
    MakeKey { source: rcgen::Error },

    #[snafu(display("{name:?} is no name for a certificate: {source}"))]
    Name { name: String, source: rcgen::Error },

    #[snafu(display("the CA is over, so what it signs is valid for nobody; a new one is needed"))]
    Over,

    #[snafu(display(
        "the step {step:?} does not fit the state of the CA, which must have changed meanwhile; look at it again"
    ))]
    OutOfStep { step: Step },

    #[snafu(display("{source}"), context(false))]
    Request { source: CsrError },

    #[snafu(display("{source}"), context(false))]
    Node { source: InvalidNode },
}

/// The CA in force, and the one that comes or goes. Cheap to clone; never changed in place.
#[derive(Clone, Debug)]
pub struct Authority {
    signing: Arc<Ca>,
    other: Other,
}

#[derive(Clone, Debug)]
enum Other {
    None,
    Next(Arc<Ca>),
    Old(Arc<Old>),
}

/// A CA whose key is gone for good.
#[derive(Debug)]
struct Old {
    certificate: CertificateDer<'static>,
    pem: String,
}

impl Authority {
    pub fn make(now: OffsetDateTime) -> Result<Self, Error> {
        Ok(Self {
            signing: Arc::new(new_ca(now)?),
            other: Other::None,
        })
    }

    /// From the entries of its Secret.
    pub fn load(entries: &BTreeMap<String, Vec<u8>>) -> Result<Self, Error> {
        let signing = pair(entries, CERTIFICATE, KEY)?;
        let next = entries.contains_key(NEXT_CERTIFICATE);
        let other = match (next, entries.get(OLD_CERTIFICATE)) {
            (false, None) => Other::None,
            (true, None) => Other::Next(Arc::new(pair(entries, NEXT_CERTIFICATE, NEXT_KEY)?)),
            (false, Some(text)) => {
                let entry = OLD_CERTIFICATE;
                let parsed = CertificateDer::from_pem_slice(text).ok();
                Other::Old(Arc::new(Old {
                    certificate: parsed.context(NotPemSnafu { entry })?,
                    pem: String::from_utf8_lossy(text).into_owned(),
                }))
            }
            (true, Some(_)) => return TwoAtOnceSnafu.fail(),
        };
        let authority = Self {
            signing: Arc::new(signing),
            other,
        };
        authority.try_bundle()?;
        Ok(authority)
    }

    /// The entries of its Secret, all of them.
    pub fn save(&self) -> BTreeMap<String, Vec<u8>> {
        let mut entries = BTreeMap::new();
        let mut put = |entry: &str, text: String| entries.insert(entry.to_owned(), text.into());
        put(CERTIFICATE, self.signing.certificate_pem().to_owned());
        put(KEY, self.signing.key_pem());
        match &self.other {
            Other::None => {}
            Other::Next(ca) => {
                put(NEXT_CERTIFICATE, ca.certificate_pem().to_owned());
                put(NEXT_KEY, ca.key_pem());
            }
            Other::Old(old) => {
                put(OLD_CERTIFICATE, old.pem.clone());
            }
        }
        entries
    }

    /// What everybody is to trust, in PEM: first the CA that signs.
    pub fn bundle_pem(&self) -> String {
        let other = match &self.other {
            Other::None => "",
            Other::Next(ca) => ca.certificate_pem(),
            Other::Old(old) => &old.pem,
        };
        let texts = [self.signing.certificate_pem(), other];
        let lines = texts.iter().flat_map(|text| text.trim().lines());
        lines.flat_map(|line| [line, "\n"]).collect()
    }

    pub fn bundle(&self) -> Bundle {
        self.try_bundle()
            .expect("the certificates of a CA that was loaded should make a bundle")
    }

    fn try_bundle(&self) -> Result<Bundle, Error> {
        Bundle::from_pem(self.bundle_pem().as_bytes()).context(InBundleSnafu)
    }

    /// What [`crate::plan::step`] decides on.
    pub fn rotation(&self) -> Rotation {
        let signing = facts(self.signing.certificate());
        match &self.other {
            Other::None => Rotation::Steady { signing },
            Other::Next(next) => Rotation::Introducing {
                signing,
                next: facts(next.certificate()),
            },
            Other::Old(old) => Rotation::Retiring {
                signing,
                old: facts(&old.certificate),
            },
        }
    }

    /// The authority after a step, to be kept before anybody sees it; `None` when there is nothing to do.
    pub fn after(&self, step: &Step, now: OffsetDateTime) -> Result<Option<Self>, Error> {
        let (signing, other) = match (step, &self.other) {
            (Step::Keep { .. }, _) => return Ok(None),
            (Step::Introduce, Other::None | Other::Next(_)) => {
                let next = Arc::new(new_ca(now)?);
                (Arc::clone(&self.signing), Other::Next(next))
            }
            (Step::Switch, Other::Next(next)) => {
                let old = Old {
                    certificate: self.signing.certificate().clone(),
                    pem: self.signing.certificate_pem().to_owned(),
                };
                (Arc::clone(next), Other::Old(Arc::new(old)))
            }
            (Step::Retire, Other::Old(_)) => (Arc::clone(&self.signing), Other::None),
            _ => return OutOfStepSnafu { step: step.clone() }.fail(),
        };
        Ok(Some(Self { signing, other }))
    }

    /// A certificate in PEM for the agent on `node`, of the key in its request.
    pub fn certify_agent(
        &self,
        request: &str,
        node: &str,
        now: OffsetDateTime,
    ) -> Result<String, Error> {
        let name = agent_name(node)?;
        let key = csr::public_key(request)?;
        let names = [name.as_str()];
        let certificate = self.issue(&key, "branchpool agent", &names, Usage::Server, now)?;
        Ok(certificate.pem())
    }

    /// For the operator's listener, under the names of its Service.
    pub(crate) fn operator_server(
        &self,
        names: &[String],
        now: OffsetDateTime,
    ) -> Result<Identity, Error> {
        let names: Vec<_> = names.iter().map(String::as_str).collect();
        self.identity(&names, Usage::Server, now)
    }

    /// For the operator's calls to agents.
    pub(crate) fn operator_client(&self, now: OffsetDateTime) -> Result<Identity, Error> {
        self.identity(&[OPERATOR_NAME], Usage::Client, now)
    }

    fn identity(
        &self,
        names: &[&str],
        usage: Usage,
        now: OffsetDateTime,
    ) -> Result<Identity, Error> {
        let key = KeyPair::generate().context(MakeKeySnafu)?;
        let certificate = self.issue(&key, "branchpool operator", names, usage, now)?;
        let identity = Identity::new(vec![certificate.into()], &key);
        Ok(identity.expect("what was just made should be a certificate"))
    }

    fn issue(
        &self,
        key: &impl PublicKeyData,
        common_name: &str,
        names: &[&str],
        usage: Usage,
        now: OffsetDateTime,
    ) -> Result<rcgen::Certificate, Error> {
        let end = facts(self.signing.certificate()).validity.not_after;
        let left = Duration::seconds(end.saturating_sub(now.unix_timestamp()));
        ensure!(left.is_positive(), OverSnafu);
        let dns = |name: &&str| {
            let parsed = (*name).try_into().map(SanType::DnsName);
            parsed.context(NameSnafu { name: *name })
        };
        let leaf = Leaf {
            common_name,
            names: names.iter().map(dns).collect::<Result<_, _>>()?,
            usage,
            // Not longer than the CA, so that nothing is left of one that is over.
            term: LEAF_TERM.min(left),
        };
        self.signing.issue(key, leaf, now).context(IssueSnafu)
    }
}

fn new_ca(now: OffsetDateTime) -> Result<Ca, Error> {
    Ca::make(CA_TERM, Some(constraints()), now).context(IssueSnafu)
}

/// Whoever trusts this CA, such as a user of the lease API, trusts it for names inside a cluster only, and for
/// an operator on the same machine.
fn constraints() -> NameConstraints {
    let domains = ["branchpool", "svc", "cluster.local", "localhost"];
    NameConstraints {
        permitted_subtrees: domains
            .map(|domain| GeneralSubtree::DnsName(domain.to_owned()))
            .into(),
        excluded_subtrees: vec![
            GeneralSubtree::IpAddress(CidrSubnet::V4([0; 4], [0; 4])),
            GeneralSubtree::IpAddress(CidrSubnet::V6([0; 16], [0; 16])),
        ],
    }
}

fn pair(
    entries: &BTreeMap<String, Vec<u8>>,
    certificate: &'static str,
    key: &'static str,
) -> Result<Ca, Error> {
    let text = |entry: &'static str| {
        let bytes = entries.get(entry).context(MissingSnafu { entry })?;
        Ok::<_, Error>(String::from_utf8_lossy(bytes))
    };
    let (key, pem) = (text(key)?, text(certificate)?);
    Ca::from_pem(&key, &pem).context(UnusableSnafu { entry: certificate })
}

fn facts(certificate: &CertificateDer<'_>) -> CaFacts {
    CaFacts {
        id: Fingerprint::of(certificate),
        validity: validity(certificate).expect("a CA's certificate should be one"),
    }
}
