package ring

import (
	"cmp"
	"slices"

	"github.com/soliton-train/soliton/elastic/plan"
)

// Neighbours returns, for each worker among the members that is not gone, the
// workers to mirror it: min(k, others) different ones, the best first. It
// depends on kinds, hosts, worker IDs and who is gone, and not on the order of the members.
// Of two lives of a worker the newer counts.
//
// The ring is in the order of hosts and, on a host, of IDs. Workers of other
// hosts come before those of the own one, and one of each host before a second
// one, so that a shard outlives as many hosts as can be. Who is the r-th on its
// host begins at the r-th worker after the end of its host, so that the load is spread:
// where all hosts have the same number of workers and there are other hosts
// for k, everyone is a neighbour of exactly k.
func Neighbours(members []Member, k int) map[plan.WorkerID][]plan.WorkerID {
	newest := make(map[plan.WorkerID]Member)
	for _, m := range members {
		if old, ok := newest[m.Worker]; m.Kind == Worker && (!ok || m.Incarnation > old.Incarnation) {
			newest[m.Worker] = m
		}
	}
	var ring []Member
	for _, m := range newest {
		if !m.State.Gone() {
			ring = append(ring, m)
		}
	}
	slices.SortFunc(ring, func(a, b Member) int { return cmp.Or(cmp.Compare(a.Host, b.Host), cmp.Compare(a.Worker, b.Worker)) })
	var hosts [][]plan.WorkerID
	for i, m := range ring {
		if i == 0 || m.Host != ring[i-1].Host {
			hosts = append(hosts, nil)
		}
		last := &hosts[len(hosts)-1]
		*last = append(*last, m.Worker)
	}

	k = max(0, min(k, len(ring)-1))
	all := make(map[plan.WorkerID][]plan.WorkerID, len(ring))
	for h, own := range hosts {
		for r, w := range own {
			all[w] = neighbours(hosts, h, r, k)
		}
	}
	return all
}

// neighbours returns the k neighbours of worker hosts[h][r]; there are as many.
func neighbours(hosts [][]plan.WorkerID, h, r, k int) []plan.WorkerID {
	found := make([]plan.WorkerID, 0, k)
	own, others := hosts[h], slices.Concat(hosts[h+1:], hosts[:h])

	// The r-th after the end of the host is the first-th of others[0], after
	// those before it have gone to the end of the line.
	first := r
	for len(others) > 0 && first >= len(others[0]) {
		first -= len(others[0])
		others = append(others, others[0])[1:]
	}
	for round, more := 0, true; more; round++ {
		more = false
		for i, host := range others {
			if round >= len(host) || len(found) == k {
				continue
			}
			begin := r
			if i == 0 {
				begin = first
			}
			found = append(found, host[(begin+round)%len(host)])
			more = true
		}
	}
	for i := 1; len(found) < k; i++ {
		found = append(found, own[(r+i)%len(own)])
	}
	return found
}
