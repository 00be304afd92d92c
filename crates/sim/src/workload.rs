//! What arrives at a cluster: how many sandboxes a job asks for at once, how many of them share an image, how long each lives and
//! what it uses. The figures are those that the field has published of its own use; what is not published says "ours".

use std::f64::consts::TAU;

use dsec_model::admission::Demand;
use fastrand::Rng;

/// Standard deviations above the mean below which 90 and 99 of 100 values of a normal distribution are.
const Z90: f64 = 1.2816;
const Z99: f64 = 2.3263;

/// A distribution whose logarithm is normal, which two of its values give.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogNormal {
    mu: f64,
    sigma: f64,
}

impl LogNormal {
    /// By its median and by what 99 of 100 do not exceed.
    pub fn by_p99(median: f64, p99: f64) -> Self {
        Self { mu: median.ln(), sigma: (p99 / median).ln() / Z99 }
    }

    /// By its median and by what 90 of 100 do not exceed.
    pub fn by_p90(median: f64, p90: f64) -> Self {
        Self { mu: median.ln(), sigma: (p90 / median).ln() / Z90 }
    }

    /// One value.
    pub fn draw(self, chance: &mut Rng) -> f64 {
        // Box and Muller's: 1 - f64() is above 0.
        let normal = (-2.0 * (1.0 - chance.f64()).ln()).sqrt() * (TAU * chance.f64()).cos();
        (self.mu + self.sigma * normal).exp()
    }

    /// How these are distributed among those that are there at some moment: one that lasts twice as long is met twice as often.
    pub fn of_those_there(self) -> Self {
        Self { mu: self.mu + self.sigma * self.sigma, ..self }
    }
}

/// What one sandbox does.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Load {
    /// How long it lives, ms.
    pub lifetime_ms: u64,
    /// Memory that it holds, MiB.
    pub memory_mib: u64,
    /// Cores that it keeps busy, in thousandths.
    pub cpu_millis: u64,
    /// What it asked for.
    pub asked: Demand,
}

/// One job: sandboxes that are asked for at once.
#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    /// The number of each one's image; equal numbers are one image.
    pub images: Vec<u64>,
}

/// What arrives.
#[derive(Debug, Clone, PartialEq)]
pub struct Workload {
    /// Minutes that a sandbox lives.
    pub lifetime_min: LogNormal,
    /// Sandboxes of a job.
    pub burst: LogNormal,
    /// Most sandboxes of a job.
    pub burst_max: u64,
    /// Sandboxes that share an image.
    pub fan_out: LogNormal,
    /// Memory that one holds, MiB.
    pub memory_mib: LogNormal,
    /// What one asks for.
    pub asked: Demand,
    images: u64,
}

/// Share of sandboxes that use at most [`LITTLE`] of the cores that they asked for, and what the others use at most.
const FRUGAL: f64 = 0.9;
const LITTLE: f64 = 0.05;
/// Ours.
const MUCH: f64 = 0.5;
/// What a sandbox asks for: ours.
const ASKED: Demand = Demand { memory_mib: 2048, cpu_millis: 1000 };
/// Largest job that the field tells of.
const BURST_MAX: u64 = 32_000;

impl Workload {
    /// Containers.
    pub fn containers() -> Self {
        Self {
            lifetime_min: LogNormal::by_p99(17.4, 231.0),
            burst: LogNormal::by_p99(352.0, 4044.0),
            burst_max: BURST_MAX,
            fan_out: LogNormal::by_p90(3.0, 28.0),
            // Ours: how it is distributed is not published.
            memory_mib: LogNormal::by_p90(160.0, 600.0),
            asked: ASKED,
            images: 0,
        }
    }

    /// MicroVMs.
    pub fn microvms() -> Self {
        Self {
            lifetime_min: LogNormal::by_p99(15.5, 214.0),
            burst: LogNormal::by_p99(2528.0, 16_388.0),
            fan_out: LogNormal::by_p90(1.0, 3.0),
            ..Self::containers()
        }
    }

    /// The next job.
    pub fn job(&mut self, chance: &mut Rng) -> Job {
        let count = (self.burst.draw(chance).round() as u64).clamp(1, self.burst_max);
        self.job_of(count, chance)
    }

    /// The next job, of so many sandboxes.
    pub fn job_of(&mut self, count: u64, chance: &mut Rng) -> Job {
        let mut images = Vec::with_capacity(usize::try_from(count).unwrap_or_default());
        while (images.len() as u64) < count {
            self.images += 1;
            let sharing = (self.fan_out.draw(chance).round() as u64).clamp(1, count - images.len() as u64);
            images.extend((0..sharing).map(|_| self.images));
        }
        chance.shuffle(&mut images);
        Job { images }
    }

    /// What one of them does.
    pub fn load(&self, chance: &mut Rng) -> Load {
        self.load_of(self.lifetime_min, chance)
    }

    /// One that is there already, and for how long it has been, ms.
    pub fn one_there(&self, chance: &mut Rng) -> (Load, u64) {
        let load = self.load_of(self.lifetime_min.of_those_there(), chance);
        let age_ms = (load.lifetime_ms as f64 * chance.f64()) as u64;
        (load, age_ms)
    }

    fn load_of(&self, lifetime_min: LogNormal, chance: &mut Rng) -> Load {
        let share = if chance.f64() < FRUGAL {
            LITTLE * chance.f64()
        } else {
            LITTLE + (MUCH - LITTLE) * chance.f64()
        };
        Load {
            lifetime_ms: (lifetime_min.draw(chance) * 60_000.0) as u64,
            memory_mib: (self.memory_mib.draw(chance) as u64).clamp(1, self.asked.memory_mib),
            cpu_millis: (share * self.asked.cpu_millis as f64) as u64,
            asked: self.asked,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sorted(count: usize, mut draw: impl FnMut(&mut Rng) -> f64) -> Vec<f64> {
        let mut chance = Rng::with_seed(7);
        let mut values: Vec<f64> = (0..count).map(|_| draw(&mut chance)).collect();
        values.sort_by(f64::total_cmp);
        values
    }

    fn near(values: &[f64], share: f64, expected: f64) {
        let found = values[(values.len() as f64 * share) as usize];
        assert!((found / expected - 1.0).abs() < 0.1, "{found} and not {expected} at {share}");
    }

    #[test]
    fn lifetimes_and_bursts_are_those_of_the_field() {
        let workload = Workload::containers();
        let lifetimes = sorted(50_000, |chance| workload.load(chance).lifetime_ms as f64 / 60_000.0);
        near(&lifetimes, 0.5, 17.4);
        near(&lifetimes, 0.99, 231.0);
        for (mut workload, p50, p99) in
            [(Workload::containers(), 352.0, 4044.0), (Workload::microvms(), 2528.0, 16_388.0)]
        {
            let bursts = sorted(5_000, |chance| workload.job(chance).images.len() as f64);
            near(&bursts, 0.5, p50);
            assert!((bursts[4950] / p99 - 1.0).abs() < 0.2, "{}", bursts[4950]);
            assert!(bursts[4999] <= 32_000.0);
        }
    }

    #[test]
    fn an_image_is_shared_by_few_and_a_load_is_mostly_small() {
        let mut workload = Workload::containers();
        let mut chance = Rng::with_seed(3);
        let mut sharing = std::collections::BTreeMap::<u64, u64>::new();
        for image in workload.job_of(32_000, &mut chance).images {
            *sharing.entry(image).or_default() += 1;
        }
        let mut counts: Vec<f64> = sharing.values().map(|count| *count as f64).collect();
        counts.sort_by(f64::total_cmp);
        assert!((2.0..=4.0).contains(&counts[counts.len() / 2]));
        assert!((20.0..=36.0).contains(&counts[counts.len() * 9 / 10]));
        let frugal = (0..10_000).filter(|_| workload.load(&mut chance).cpu_millis <= 50).count();
        assert!((8_800..=9_300).contains(&frugal), "{frugal}");
    }

    #[test]
    fn who_is_there_lives_longer_than_who_comes() {
        let workload = Workload::containers();
        let there = sorted(20_000, |chance| workload.one_there(chance).0.lifetime_ms as f64);
        let coming = sorted(20_000, |chance| workload.load(chance).lifetime_ms as f64);
        assert!(there[10_000] > 2.0 * coming[10_000]);
        let mut chance = Rng::with_seed(1);
        for _ in 0..1000 {
            let (load, age_ms) = workload.one_there(&mut chance);
            assert!(age_ms <= load.lifetime_ms);
        }
    }
}
