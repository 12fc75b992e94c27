// Package collective measures collectives between processes of one machine against OpenMPI and Gloo.
package collective

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/soliton-train/soliton/bench/internal/lab"
	"github.com/soliton-train/soliton/bench/internal/peers"
	"github.com/soliton-train/soliton/bench/internal/report"
	"github.com/soliton-train/soliton/internal/net/group"
	"github.com/soliton-train/soliton/internal/net/transport"
)

// AllReduce compares the all-reduce of a group of workers, on one host with reads of memory and without, and over TCP, with that of OpenMPI, over memory and TCP, that of
// Gloo, and what the loopback interface carries ([loopback]). Each rank is a process. A figure is the mean of some calls in a row, of the slowest rank. Sides take turns; between their turns our ranks sleep, and
// those of the peers do not exist, so each side first reduces for some 50 ms that do not count.
func AllReduce(args []string, rec *report.Recorder) error {
	f := flag.NewFlagSet("allreduce", flag.ExitOnError)
	role := f.String("role", "", "rank: a process that this command starts")
	self := f.Int("rank", 0, "of such a process")
	links := f.String("links", "", "of such a process: host, sockets, tcp or loopback")
	folder := f.String("folder", "", "of such a process: where its sockets are")
	ranks := f.String("ranks", "2,4,8", "numbers of ranks")
	sizes := f.String("sizes", "1024,65536,1048576,16777216", "bytes that are reduced, multiples of 4")
	turns := f.Int("turns", 5, "turns of each side")
	algorithm := f.String("algorithm", "auto", "of ours over TCP: auto, ring, direct, pairwise or halving")
	if err := f.Parse(args); err != nil {
		return err
	}
	way := group.Auto
	for ; way.String() != *algorithm; way++ {
		if way == group.Halving {
			return fmt.Errorf("-algorithm is %q; give auto, ring, direct, pairwise or halving", *algorithm)
		}
	}
	if *role == "rank" {
		return rank(*self, *links, *folder, way)
	}
	counts, err := numbers(*ranks, 2, 64)
	if err != nil {
		return fmt.Errorf("-ranks: %w", err)
	}
	bytes, err := numbers(*sizes, 4, 1<<30)
	if err != nil {
		return fmt.Errorf("-sizes: %w", err)
	}
	if *turns < 1 {
		return errors.New("-turns: give at least 1")
	}
	dir, err := os.MkdirTemp("", "sb")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	b := bench{dir: dir, turns: *turns, rec: rec, algorithm: way}
	fmt.Printf("%s, %d cores\n", runtime.Version(), runtime.NumCPU())
	if b.mpi, err = peers.CompileMPI(dir); err != nil {
		fmt.Printf("no OpenMPI: %v\n", err)
	} else {
		fmt.Printf("peer: %s\n", b.mpi.Version)
	}
	if b.gloo, err = peers.StartPeer("gloo_allreduce.py", "OMP_NUM_THREADS=1"); err != nil {
		fmt.Printf("no Gloo: %v\n", err)
	} else {
		defer b.gloo.Close()
		fmt.Printf("peer: %s\n", b.gloo.Hello)
	}
	for _, n := range counts {
		if err := b.compare(n, bytes); err != nil {
			return fmt.Errorf("%d ranks: %w", n, err)
		}
	}
	return nil
}

// numbers reads numbers that commas separate.
func numbers(list string, least, most int) (all []int, err error) {
	for _, word := range strings.Split(list, ",") {
		var n int
		if _, err := fmt.Sscan(word, &n); err != nil || n < least || n > most {
			return nil, fmt.Errorf("%q: give numbers of %d to %d, with commas between them", word, least, most)
		}
		all = append(all, n)
	}
	return all, nil
}

type bench struct {
	dir       string
	turns     int
	rec       *report.Recorder
	algorithm group.Algorithm
	mpi       *peers.MPI  // nil: it is missing
	gloo      *peers.Peer // the same
}

// side is one of those that take turns; ask returns the milliseconds of a call, one for each round.
type side struct {
	name string
	ask  func(elements, rounds, calls int) ([]float64, error)
	warm int       // rounds that do not count
	ms   []float64 // the median of each turn
}

// contests say who is compared with whom, and with what goal: for bandwidth, and for the latency of 2 ranks.
var contests = []struct {
	ours, theirs     string
	goal, latencyTwo float64
}{
	{"one host", "OpenMPI, memory", 1, 0.5}, {"TCP", "OpenMPI, TCP", 1.5, 0}, {"TCP", "loopback", 0.9, 0}, {"one host", "Gloo", 5, 0}, {"TCP", "Gloo", 5, 0},
}

// compare measures all sizes with so many ranks.
func (b *bench) compare(n int, sizes []int) (err error) {
	var sides []*side
	for _, links := range []struct{ name, links string }{{"one host", "host"}, {"sockets", "sockets"}, {"TCP", "tcp"}, {"loopback", "loopback"}} {
		folder := filepath.Join(b.dir, fmt.Sprintf("%s%d", links.links, n))
		if err := os.Mkdir(folder, 0o700); err != nil {
			return err
		}
		if len(folder)+len("/00") > transport.MaxPath {
			return fmt.Errorf("%s is too long for sockets; set TMPDIR to a shorter folder", folder)
		}
		algorithm := group.Auto
		if links.links == "tcp" {
			algorithm = b.algorithm
		}
		c, err := startCrew(n, links.links, folder, algorithm)
		if err != nil {
			return fmt.Errorf("%s: %w", links.name, err)
		}
		defer c.close()
		sides = append(sides, &side{name: links.name, ask: c.ask})
	}
	if b.mpi != nil {
		for _, links := range []struct{ name, btl string }{{"OpenMPI, memory", "vader,self"}, {"OpenMPI, TCP", "tcp,self"}} {
			sides = append(sides, &side{name: links.name, ask: func(elements, rounds, calls int) ([]float64, error) {
				return b.mpi.Ask(n, links.btl, elements, rounds, calls)
			}})
		}
	}
	if b.gloo != nil {
		sides = append(sides, &side{name: "Gloo", ask: func(elements, rounds, calls int) ([]float64, error) {
			return b.gloo.Ask("%d %d %d %d", n, elements, rounds, calls)
		}})
	}
	for _, size := range sizes {
		calls := min(max(1, 4<<20/size), 200)
		fmt.Printf("\n%d ranks, %d bytes, %d calls in a row: ms of a call, medians of each turn\n", n, size, calls)
		for _, s := range sides {
			x, err := s.ask(size/4, 1, calls)
			if err != nil {
				return fmt.Errorf("%s: %w", s.name, err)
			}
			s.ms, s.warm = nil, int(min(max(1, 50/(x[0]*float64(calls))), 500))
		}
		for turn := range b.turns {
			for i := range sides {
				s := sides[(turn+i)%len(sides)]
				x, err := s.ask(size/4, s.warm+5, calls)
				if err != nil {
					return fmt.Errorf("%s: %w", s.name, err)
				}
				s.ms = append(s.ms, lab.Median(x[s.warm:]))
			}
		}
		b.record(n, size, sides)
	}
	return nil
}

// record prints and records what the sides took for a size: bandwidth on the bus, as NCCL's tests count it, or latency where that is what takes time.
func (b *bench) record(n, size int, sides []*side) {
	bus := 2 * float64(n-1) / float64(n) * float64(size) / 1e6 // GB/s where divided by ms
	took := make(map[string][]float64)
	for _, s := range sides {
		took[s.name] = s.ms
		fmt.Printf("  %-16s", s.name)
		for _, ms := range s.ms {
			fmt.Printf(" %8.4f", ms)
		}
		fmt.Printf("  median %.4f ms, %.3f GB/s\n", lab.Median(s.ms), bus/lab.Median(s.ms))
	}
	for _, c := range contests {
		ours, theirs := took[c.ours], took[c.theirs]
		if c.ours == "TCP" && b.algorithm != group.Auto {
			c.ours += ", " + b.algorithm.String()
		}
		row := report.Row{
			Comparison: "allreduce", Case: fmt.Sprintf("%d KiB", size>>10), Workers: n, Ours: c.ours, Theirs: c.theirs, Unit: "GB/s of the bus", Kind: report.Rate, Goal: c.goal,
		}
		latency := size < 64<<10
		if latency {
			row.Unit, row.Kind, row.Goal = "ms", report.Time, 0
			if n == 2 {
				row.Goal = c.latencyTwo
			}
		}
		for turn := range theirs {
			if latency {
				row.Add(ours[turn], theirs[turn])
			} else {
				row.Add(bus/ours[turn], bus/theirs[turn])
			}
		}
		b.rec.Add(row)
	}
}
