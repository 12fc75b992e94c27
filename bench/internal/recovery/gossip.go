package recovery

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/soliton-train/soliton/bench/internal/lab"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/gossip"
	"github.com/soliton-train/soliton/internal/timing"
)

// Gossip measures what a member of the gossip ring costs, and when all others know of one that has failed, for rings of several
// sizes. All members are in this process and encrypt, as those of several machines do.
func Gossip(args []string) error {
	f := flag.NewFlagSet("gossip", flag.ExitOnError)
	sizes := f.String("members", "10,100,300,1000", "sizes of the rings")
	length := f.Duration("duration", 20*time.Second, "how long each ring is measured without a failure")
	trials := f.Int("trials", 5, "members that fail, one after the other")
	detect := f.Duration("detect", 2*time.Second, "time within which a failure is to be known; with more than 100 members, which share this machine's processors, at least 60ms for each")
	_ = f.Parse(args)

	fmt.Println("                              for each member                                    after a failure, medians")
	fmt.Println("members  detect  probe in  processor time  sent           packets      memory    first      all (range)              suspected, dead without a failure")
	for text := range strings.SplitSeq(*sizes, ",") {
		n, err := strconv.Atoi(text)
		if err != nil || n < 3 || n > gossip.MaxMembers {
			return fmt.Errorf("--members %s: give numbers of 3 to %d", *sizes, gossip.MaxMembers)
		}
		within := *detect
		if n > 100 {
			within = max(within, time.Duration(n)*60*time.Millisecond)
		}
		if err := gossipOf(n, *length, *trials, within); err != nil {
			return fmt.Errorf("%d members: %w", n, err)
		}
	}
	return nil
}

func gossipOf(n int, length time.Duration, trials int, detect time.Duration) error {
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	b := &board{members: make([]known, n)}
	b.forming.Store(true)
	defer b.close()
	for i := range n {
		if err := b.open(i, detect); err != nil {
			return err
		}
		// Each member tells the news of each other one some dozen times over. What all would say at once is more than these processors
		// can hear before they suspect each other.
		if have := i + 1; have%max(joinWave, n/10) == 0 || have == n {
			if err := b.form(have); err != nil {
				return err
			}
		}
	}
	b.formed()
	runtime.GC()
	runtime.ReadMemStats(&after)
	memory := float64(after.HeapInuse+after.StackInuse-before.HeapInuse-before.StackInuse) / float64(n)

	began, cpu, sent, packets := time.Now(), processorTime(), loopback(8), loopback(9)
	time.Sleep(length)
	seconds := time.Since(began).Seconds()
	per := func(x float64) float64 { return x / seconds / float64(n) }
	cpuMS, sentKB, packetsSent := per(float64(processorTime()-cpu)/1e6), per(float64(loopback(8)-sent)/1e3), per(float64(loopback(9)-packets))
	wrong := b.wrong()

	var first, last []float64
	for trial := range trials {
		victim := id.WorkerID(trial * n / trials)
		failed := time.Now()
		b.fail(victim)
		if err := b.until(2*time.Minute, n, "know of a failed member", func(k known) bool { return k.failed || !k.dead[victim].IsZero() }); err != nil {
			return err
		}
		from, to := b.span(victim)
		first, last = append(first, from.Sub(failed).Seconds()), append(last, to.Sub(failed).Seconds())
	}
	probes := timing.GossipOf(detect, n).Interval
	fmt.Printf("%7d  %6v  %8v  %9.2f ms/s  %8.1f kB/s  %9.1f/s  %7.0f kB  %6.2f s  %6.2f s (%.2f to %.2f)  %s\n", n, detect, probes.Round(time.Millisecond), cpuMS,
		sentKB, packetsSent, memory/1000, lab.Median(first), lab.Median(last), slices.Min(last), slices.Max(last), wrong)
	return nil
}

// joinWave is how many members join before all are to know of them, at least; a tenth in large rings.
const joinWave = 25

// formAgain is after how long members that do not know all others yet exchange all that they know with another one. By themselves they do
// so every three times the detection time, and memberlist does it six times less often with 600 members: with the detection times of large
// rings here, every 11 minutes.
const formAgain = 5 * time.Second

// form waits until the first n members know each other.
func (b *board) form(n int) error {
	all := func(k known) bool { return k.alive == n }
	for began := time.Now(); ; {
		err := b.until(formAgain, n, "know all members", all)
		if err == nil || time.Since(began) > 40*formAgain {
			return err
		}
		b.mu.Lock()
		var lack []*gossip.Ring
		for _, k := range b.members[:n] {
			if !all(k) {
				lack = append(lack, k.ring)
			}
		}
		b.mu.Unlock()
		for _, r := range lack {
			if err := r.Join(context.Background(), b.members[rand.IntN(n)].ring.Addr()); err != nil {
				return err
			}
		}
	}
}

// board has what each member of a ring knows.
type board struct {
	forming  atomic.Bool
	mu       sync.Mutex
	members  []known
	watchers sync.WaitGroup
}

type known struct {
	ring    *gossip.Ring
	done    chan struct{} // closed when it is not watched any more
	failed  bool
	alive   int
	dead    map[id.WorkerID]time.Time // since when
	suspect map[id.WorkerID]bool      // at some time
}

// open adds a member, which joins by one of the others.
func (b *board) open(i int, detect time.Duration) error {
	r, err := gossip.Open(gossip.Config{
		Self: gossip.Identity{Kind: gossip.Worker, Worker: id.WorkerID(i), Host: fmt.Sprintf("host-%d", i/8), Addr: "127.0.0.1:1"},
		Job:  "bench", SecretKey: bytes.Repeat([]byte{7}, 32), Detect: detect, Members: len(b.members),
	})
	if err != nil {
		return err
	}
	k := &b.members[i]
	*k = known{ring: r, done: make(chan struct{}), dead: map[id.WorkerID]time.Time{}, suspect: map[id.WorkerID]bool{}}
	b.watchers.Go(func() {
		for {
			select {
			case <-k.done:
				return
			case <-r.Changed():
				if b.forming.Load() { // to list all members at each change would cost more than the ring does
					time.Sleep(200 * time.Millisecond)
				}
				b.note(k, r.Members())
			}
		}
	})
	if i == 0 {
		return nil
	}
	return r.Join(context.Background(), b.members[i/2].ring.Addr())
}

func (b *board) note(k *known, members []gossip.Member) {
	b.mu.Lock()
	defer b.mu.Unlock()
	k.alive = 0
	for _, m := range members {
		switch m.State {
		case gossip.StateAlive:
			k.alive++
		case gossip.StateSuspect:
			k.suspect[m.Worker] = true
		case gossip.StateDead:
			if k.dead[m.Worker].IsZero() {
				k.dead[m.Worker] = time.Now()
			}
		}
	}
}

// formed begins the measurement: what was suspected while members joined does not count.
func (b *board) formed() {
	b.forming.Store(false)
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, k := range b.members {
		clear(k.suspect)
		clear(k.dead)
	}
}

// fail ends a member without a word.
func (b *board) fail(victim id.WorkerID) {
	k := &b.members[victim]
	close(k.done)
	k.ring.Close()
	b.mu.Lock()
	k.failed = true
	b.mu.Unlock()
}

// until waits for the first n members.
func (b *board) until(limit time.Duration, n int, what string, is func(known) bool) error {
	for began := time.Now(); ; time.Sleep(5 * time.Millisecond) {
		b.mu.Lock()
		have := 0
		for _, k := range b.members[:n] {
			if is(k) {
				have++
			}
		}
		b.mu.Unlock()
		switch {
		case have == n:
			return nil
		case time.Since(began) > limit:
			return fmt.Errorf("%d of %d %s within %v", have, n, what, limit)
		}
	}
}

// span returns when the first and the last member knew of a failed one.
func (b *board) span(victim id.WorkerID) (first, last time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, k := range b.members {
		switch at := k.dead[victim]; {
		case at.IsZero():
		case first.IsZero() || at.Before(first):
			first = at
			fallthrough
		case at.After(last):
			last = at
		}
	}
	return first, last
}

// wrong counts the members that were suspected, or taken for dead, though none has failed.
func (b *board) wrong() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	suspected, dead := map[id.WorkerID]bool{}, map[id.WorkerID]bool{}
	for _, k := range b.members {
		for w := range k.suspect {
			suspected[w] = true
		}
		for w := range k.dead {
			dead[w] = true
		}
	}
	return fmt.Sprintf("%d, %d", len(suspected), len(dead))
}

func (b *board) close() {
	for i := range b.members {
		if k := &b.members[i]; k.ring != nil && !k.failed {
			b.fail(id.WorkerID(i))
		}
	}
	b.watchers.Wait()
}

// processorTime is what this process has used, in nanoseconds.
func processorTime() int64 {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u) // it cannot fail with these arguments
	return u.Utime.Nano() + u.Stime.Nano()
}

// loopback reads a column of the loopback interface's counters: 8 is bytes sent, 9 packets. It is 0 where there is no /proc.
func loopback(column int) int64 {
	text, _ := os.ReadFile("/proc/net/dev")
	for line := range strings.Lines(string(text)) {
		name, counters, ok := strings.Cut(line, ":")
		if fields := strings.Fields(counters); ok && strings.TrimSpace(name) == "lo" && len(fields) > column {
			n, _ := strconv.ParseInt(fields[column], 10, 64)
			return n
		}
	}
	return 0
}
