use super::*;

fn node(name: &str) -> NodeId {
    name.parse().unwrap()
}

fn issued(number: u8) -> IssuedRecord {
    let certificate = Fingerprint([number; 32]).to_string();
    IssuedRecord { certificate, key: Fingerprint([100 + number; 32]).to_string(), until_ms: 1_000_000 }
}

fn joiner<'a>(token: &'a str, node: &'a NodeId, key: u8) -> Joiner<'a> {
    Joiner { token, node, key: Fingerprint([100 + key; 32]), address: "10.0.0.1:7421" }
}

fn announcer<'a>(node: &'a NodeId, certificate: u8, instance: &'a str) -> Announcer<'a> {
    Announcer { node, certificate: Fingerprint([certificate; 32]), instance, address: "10.0.0.1:7421" }
}

/// With these tokens, each good until 1000 ms.
fn with_tokens(tokens: &[(&str, Option<&str>)]) -> Known {
    let mut known = Known::default();
    for (kept, name) in tokens {
        let record = TokenRecord { node: name.map(node), expires_ms: 1000, used: None };
        known.add_token((*kept).to_owned(), record, 0).unwrap();
    }
    known
}

/// With the node n1, of certificate 1.
fn with_n1() -> Known {
    let mut known = with_tokens(&[("t", None)]);
    let n1 = node("n1");
    known.may_join(&joiner("t", &n1, 1), false, 10).unwrap();
    known.join(&joiner("t", &n1, 1), issued(1), 10);
    known
}

#[test]
fn a_token_is_good_once_and_for_its_time_and_name() {
    let (n1, n2) = (node("n1"), node("n2"));
    let mut known = with_tokens(&[("any", None), ("named", Some("n2"))]);
    assert_eq!(known.may_join(&joiner("none", &n1, 1), false, 10), Err(Refusal::UnknownToken));
    assert_eq!(
        known.may_join(&joiner("any", &n1, 1), false, 1000),
        Err(Refusal::ExpiredToken { at_ms: 1000 })
    );
    let other = Refusal::OtherName { node: n2.clone(), given: n1.clone() };
    assert_eq!(known.may_join(&joiner("named", &n1, 1), false, 10), Err(other));
    known.may_join(&joiner("any", &n1, 1), false, 999).unwrap();
    known.join(&joiner("any", &n1, 1), issued(1), 999);
    let used = Err(Refusal::UsedToken { node: n1.clone(), at_ms: 999 });
    assert_eq!(known.may_join(&joiner("any", &n2, 2), false, 999), used);
    assert_eq!(known.may_join(&joiner("any", &n1, 2), false, 999), used, "another key under the same name");
    // The same machine whose answer was lost is no other, whenever it comes.
    known.may_join(&joiner("any", &n1, 1), false, 5000).unwrap();
    known.forget(&n1);
    assert_eq!(
        known.may_join(&joiner("any", &n1, 1), false, 999),
        used,
        "forgotten, and in by the old token"
    );
}

#[test]
fn a_name_has_one_node() {
    let mut known = with_n1();
    known.add_token("u".to_owned(), TokenRecord { node: None, expires_ms: 1000, used: None }, 0).unwrap();
    let (n1, n2) = (node("n1"), node("n2"));
    let taken = |is_configured, node: &NodeId| Err(Refusal::NameTaken { node: node.clone(), is_configured });
    assert_eq!(known.may_join(&joiner("u", &n1, 2), false, 10), taken(false, &n1));
    assert_eq!(known.may_join(&joiner("u", &n2, 2), true, 10), taken(true, &n2));
    assert!(known.forget(&n1));
    assert!(!known.forget(&n1));
    known.may_join(&joiner("u", &n1, 2), false, 10).unwrap();
}

#[test]
fn tokens_and_what_was_forgotten_go_when_nobody_can_come_with_them() {
    let mut known = with_n1();
    known.forget(&node("n1"));
    known.forget_old(1000 + REMEMBERED_MS - 1);
    assert_eq!((known.tokens.len(), known.forgotten.len()), (1, 0));
    known.forget_old(1000 + REMEMBERED_MS);
    assert_eq!(known.tokens.len(), 0);
}

#[test]
fn an_old_certificate_counts_until_the_newer_one_was_shown_and_never_again() {
    let mut known = with_n1();
    let n1 = node("n1");
    let print = |number: u8| Fingerprint([number; 32]);
    known.renewed(&n1, issued(2));
    // The answer with the new one may have been lost.
    assert_eq!(known.standing(&n1, print(1)), Ok(Standing::Current));
    known.shown(&n1, print(1));
    known.renewed(&n1, issued(3));
    assert_eq!(known.standing(&n1, print(2)), Err(Refusal::Replayed { node: n1.clone() }));
    assert_eq!(known.standing(&n1, print(3)), Ok(Standing::Confirms));
    known.shown(&n1, print(3));
    assert_eq!(known.standing(&n1, print(3)), Ok(Standing::Current));
    assert_eq!(known.standing(&n1, print(1)), Err(Refusal::Replayed { node: n1 }));
}

#[test]
fn a_forgotten_node_stays_forgotten_also_when_its_name_is_somebody_elses() {
    let mut known = with_n1();
    let n1 = node("n1");
    known.forget(&n1);
    let forgotten = Err(Refusal::Forgotten { node: n1.clone() });
    assert_eq!(known.standing(&n1, Fingerprint([1; 32])), forgotten);
    assert_eq!(known.announced(&announcer(&n1, 1, "a"), None), forgotten.clone().map(|_| ()));
    known.join(&joiner("t", &n1, 2), issued(2), 20);
    assert_eq!(known.standing(&n1, Fingerprint([1; 32])), forgotten);
    assert_eq!(known.standing(&n1, Fingerprint([2; 32])), Ok(Standing::Current));
}

#[test]
fn an_edge_is_replaced_by_the_next_and_does_not_come_back() {
    let mut known = with_n1();
    let n1 = node("n1");
    let first = announcer(&n1, 1, "a");
    assert_eq!(known.rival(&first), Ok(None));
    known.announced(&first, None).unwrap();
    assert_eq!(known.rival(&first), Ok(None));
    let second = Announcer { address: "10.0.0.2:1", ..announcer(&n1, 1, "b") };
    let rival = known.rival(&second).unwrap().unwrap();
    assert_eq!(rival, ("10.0.0.1:7421".to_owned(), "a".to_owned()));
    // Nobody looked whether the first lives, or looked at another.
    assert!(matches!(known.announced(&second, None), Err(Refusal::Cloned { .. })));
    assert!(matches!(known.announced(&second, Some("c")), Err(Refusal::Cloned { .. })));
    known.announced(&second, Some("a")).unwrap();
    assert_eq!(known.nodes[&n1].address, "10.0.0.2:1");
    // Then the first lives after all.
    assert!(matches!(known.rival(&first), Err(Refusal::Cloned { .. })));
    for number in 0..40 {
        let (before, next) = (known.nodes[&n1].instance.clone(), format!("i{number}"));
        known.announced(&announcer(&n1, 1, &next), before.as_deref()).unwrap();
    }
    assert_eq!(known.nodes[&n1].replaced.len(), REPLACED_MAX);
}
