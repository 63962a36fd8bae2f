//! What a stranger can reach, fed with the bytes of a whole login. Shared by the fuzzer and a test.

use std::{collections::BTreeMap, sync::LazyLock};

use branchpool_gateway::{
    Verifier,
    scram::{self, Challenge},
    startup::{Packet, Startup},
    takeover::{self, Offer, Verdict},
};
use bytes::{Buf, Bytes};

/// Few iterations: the client does that work, not the server.
static VERIFIER: LazyLock<Verifier> = LazyLock::new(|| Verifier::derive("secret", [7; 16], 1));

/// A start-up packet, a first and a second SASL message, each behind its length; what is missing
/// is empty. Panics when something holds that must not.
pub(crate) fn login(stream: &[u8]) {
    let mut stream = Bytes::copy_from_slice(stream);
    let packet = sized(&mut stream);
    if let Ok(Packet::Startup(startup)) = Packet::parse(packet) {
        assert!(!startup.user.is_empty());
        choose(&startup);
    }
    let (first, second) = (sized(&mut stream), sized(&mut stream));
    prove(&first, &second);
}

fn choose(startup: &Startup) {
    let parameters = BTreeMap::from([("client_encoding".to_owned(), "UTF8".to_owned())]);
    let learned = takeover::profile_of(startup);
    for profile in [Some(Vec::new()), learned.clone()].into_iter().flatten() {
        let offer = Offer {
            first_session: true,
            role: "app",
            database: "shop",
            profile: &profile,
            parameters: &parameters,
        };
        if let Verdict::TakeOver { application_name } = takeover::decide(startup, "app", &offer) {
            assert!(!startup.replication && startup.protocol_options.is_empty());
            // One statement, whatever the name is.
            let set = application_name.map(|name| takeover::set_application_name(&name));
            assert!(set.is_none_or(|set| !set.contains('\n') && set.ends_with('\'')));
        }
    }
    if let Some(profile) = learned {
        let offer = Offer {
            first_session: true,
            role: "app",
            database: str::from_utf8(startup.database.as_deref().unwrap_or_default())
                .unwrap_or("shop"),
            profile: &profile,
            parameters: &parameters,
        };
        let verdict = takeover::decide(startup, "app", &offer);
        let same_database = takeover::is_pools(startup, offer.database);
        // Who was learned from can take over what was opened for it.
        assert_eq!(matches!(verdict, Verdict::TakeOver { .. }), same_database);
    }
}

fn prove(first: &[u8], second: &[u8]) {
    let Some((mechanism, client_first)) = scram::initial_response(first) else {
        return;
    };
    for binding in [None, Some(&b"hash"[..])] {
        let verifier = VERIFIER.clone();
        if let Ok(challenge) = Challenge::new(mechanism, client_first, verifier, binding, "nonce") {
            assert!(
                challenge.finish(second).is_err(),
                "nobody knows the password"
            );
        }
    }
}

fn sized(stream: &mut Bytes) -> Bytes {
    let length = stream.try_get_u32().unwrap_or(0) as usize;
    stream.split_to(length.min(stream.len()))
}
