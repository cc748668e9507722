//! Salts and namespaces: nobody finds, anywhere, what another tenant computed.

use super::{Served, overcommitted, pool, prompt, swapping};
use paged_kv::{MissReason, Namespace, PreemptionMode, PrefixCacheConfig, Request, SchedulerConfig};

fn salted(salt: u64) -> Namespace {
    Namespace { salt, ..Namespace::default() }
}

#[test]
fn b43_salts_keep_tenants_apart() {
    let mut served = Served::new(SchedulerConfig::default(), pool(32, 0));
    let tokens = prompt(1, 13);
    for (salt, cached) in [(1, 0), (2, 0), (1, 12), (0, 0)] {
        let report = served.serve(&tokens, |request| request.namespace(salted(salt)));
        assert_eq!(report.cached_tokens, cached, "salt {salt}");
        assert_eq!(report.miss, if cached > 0 { MissReason::None } else { MissReason::Unseen });
    }
}

#[test]
fn b43_salts_keep_tenants_apart_even_where_all_hashes_are_alike() {
    let mut served = Served::new(SchedulerConfig::default(), pool(32, 0));
    served.scheduler.set_constant_hash(Some(0));
    for (salt, cached) in [(1, 0), (2, 0), (1, 12), (0, 0)] {
        let report = served.serve(&prompt(1, 13), |request| request.namespace(salted(salt)));
        assert_eq!(report.cached_tokens, cached, "salt {salt}");
    }
}

#[test]
fn everything_that_changes_keys_and_values_is_a_namespace_of_its_own() {
    let mut served = Served::new(SchedulerConfig::default(), pool(64, 0));
    let zero = Namespace::default();
    let spaces = [
        zero,
        Namespace { model: 1, ..zero },
        Namespace { adapter: 1, ..zero },
        Namespace { positions: 1, ..zero },
        Namespace { salt: 1, ..zero },
        Namespace { model: 1, adapter: 1, ..zero },
    ];
    for cached in [0, 12] {
        for space in spaces {
            let report = served.serve(&prompt(1, 13), |request| request.namespace(space));
            assert_eq!(report.cached_tokens, cached, "{space:?}");
        }
    }
}

#[test]
fn equal_prompts_of_different_tenants_in_one_step_share_nothing() {
    let mut served = Served::new(SchedulerConfig::default(), pool(32, 0));
    let tokens = prompt(1, 13);
    let tenants =
        [1, 2].map(|salt| served.add(&tokens, |r: Request| r.max_new_tokens(6).namespace(salted(salt))));
    let step = served.step();
    assert_eq!((step.rows, step.admitted().len()), (26, 2), "neither waits for the other");
    assert_eq!(served.scheduler.stats().cache.shared_blocks, 0);
    served.finish();
    assert!(tenants.iter().all(|&tenant| served.answers(tenant, &tokens) == 6));
}

#[test]
fn a_branch_and_a_next_turn_stay_in_their_sequences_namespace() {
    let mut served = Served::new(SchedulerConfig::default(), pool(32, 0));
    let tokens = prompt(1, 8);
    let chat = served.add(&tokens, |r| r.max_new_tokens(4).keep(true).namespace(salted(1)));
    served.finish();
    let branch = Request::new(prompt(2, 9)).max_new_tokens(1);
    let branch = served.scheduler.fork(chat, 8, branch).unwrap();
    let branched = [tokens.clone(), prompt(2, 9)].concat();
    served.tokens.insert(branch.sample(0), branched.clone());
    served.extend(chat, &prompt(3, 9), |request| request.max_new_tokens(1));
    served.finish();
    let turn = served.tokens[&chat.sample(0)][..8 + 4 + 9].to_vec();
    for tokens in [branched, turn] {
        let cache = served.scheduler.cache();
        assert_eq!(cache.find_prefix(&salted(0), &tokens), 0);
        assert_eq!(cache.find_prefix(&salted(2), &tokens), 0);
        assert_eq!(cache.find_prefix(&salted(1), &tokens) as usize, (tokens.len() - 1) / 4 * 4);
    }
}

#[test]
fn what_a_tenant_has_in_the_host_pool_is_found_by_nobody_else() {
    let config = SchedulerConfig {
        preemption: PreemptionMode::Swap,
        prefix_cache: Some(PrefixCacheConfig::default()),
        ..overcommitted()
    };
    for config in [config, swapping()] {
        let mut served = Served::new(config, pool(6, 8));
        let tokens = prompt(1, 8);
        let requests = [1, 2]
            .map(|salt| served.add(&tokens, |request| request.max_new_tokens(8).namespace(salted(salt))));
        let step = served.steps_until(|_, step| !step.preempted().is_empty());
        assert_eq!(step.outs.len(), 3, "equal tokens, but another tenant's");
        for salt in [0, 1, 3] {
            let theirs = &served.tokens[&requests[1].sample(0)];
            let known = served.scheduler.cache().find_prefix(&salted(salt), theirs);
            let own = if salt == 1 && config.prefix_cache.is_some() { 8 } else { 0 };
            assert!(known <= own + 4, "salt {salt} finds {known}");
            assert!(salt == 1 || known == 0, "salt {salt} finds {known}");
        }
        served.finish();
        assert!(requests.iter().all(|&request| served.answers(request, &tokens) == 8));
    }
}
