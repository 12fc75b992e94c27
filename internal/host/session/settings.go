package session

import (
	"cmp"
	"fmt"
	"runtime"
	"slices"
	"time"

	"github.com/soliton-train/soliton/internal/timing"

	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/faults"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/platform/progress"
	"github.com/soliton-train/soliton/internal/store/checkpoint"
)

// Settings are what the user chose for a run, the same on every host. The zero value is that of a run with one worker.
type Settings struct {
	// Program is the name of the program in messages, as the user gave it. "" means "the program".
	Program string

	// Command and Dir let the launcher resume the run: PROGRAM as it was given, and the directory in which it was given. Without a
	// Command there are no checkpoints. Args, if it is not nil, are the flags of the program. Python is the interpreter that was given
	// for a Python program.
	Command, Dir string
	Args         []string
	Python       string

	// Resume is the run that is resumed; nil for a run that begins.
	Resume *Resume

	// Threads is the number of compute threads of each worker. 0 means the cores that this process may use divided by the number of
	// workers, at least 1.
	Threads int

	// Stages is the number of pipeline stages of the first plan. 0 means 1.
	Stages int

	// Mirrors is the number of replicas of each shard beside its owner's. A run survives as many failures at a time without a
	// rollback. 0 means 1, below 0 none.
	Mirrors int

	// MinWorkers is the least number of workers with which training continues. 0 means 1.
	MinWorkers int

	// Detect is the failure-detection timeout, which counts from a worker's Hello on; before, HelloTimeout counts. No worker is
	// evicted earlier, and on a machine where everything is late, later. 0 means no detection.
	Detect time.Duration

	Reduction Reduction

	// Zero is the stage of ZeRO. Both stages split the optimizer's state over the workers of a pipeline stage. In stage 2, only the
	// owner of a shard has its complete gradient; in stage 1, all of them have it. 0 means 2.
	Zero int

	// Reshape says what may be rebalanced between steps.
	Reshape controller.Reshape

	// NoDigests lets the workers trust their memory. Otherwise they keep digests of the state of the job, and repair corrupted memory
	// before it is used.
	NoDigests bool

	// Verify is how many micro-batches a worker runs for each that it repeats in a spot check, on average. 0 means DefaultVerify, and
	// a negative number that there are none.
	Verify int

	// SkipBad has samples skipped that no worker can read. Otherwise they end the run. It takes digests: where a worker is lost that has
	// read a sample which is skipped then, what it has handed on differs from what is computed in its place, and the step is done again.
	SkipBad bool

	// Chaos, if it is not nil, returns the faults that workers are to inject into themselves, for a job of so many steps. The
	// session hands them on unread. An error is one of usage.
	Chaos func(steps int) (faults []string, err error) `json:"-"`

	// Respawn has a worker that is lost replaced by the next incarnation. It needs Start.
	Respawn bool

	// CallTimeout is the least time after which a call of user code counts as blocked, so that its worker is evicted. 0 means 1 min,
	// below 0 never.
	CallTimeout time.Duration

	// Keep says which checkpoints stay.
	Keep checkpoint.Keep

	// Checkpoints is where checkpoints go beside the run directory, as the user knows it; "" for nowhere.
	Checkpoints string

	// HelloTimeout is how long a worker may take until it calls trainer.Main. 0 means 30 s, which is long for a process to start and
	// short for a person to wait.
	HelloTimeout time.Duration
}

// MinDetect is the least Config.Detect: three heartbeats. MaxDetect is the most.
const (
	MinDetect = timing.Min
	MaxDetect = timing.Max
)

// DefaultVerify is the Config.Verify that takes 0.4 % of a run's time.
const DefaultVerify = 256

// verify returns Verify, 0 for none.
func (c Settings) verify() int { return max(cmp.Or(c.Verify, DefaultVerify), 0) }

// MinCallTimeout is the least Config.CallTimeout: calls are looked at with every heartbeat. MaxCallTimeout is the most.
const (
	MinCallTimeout = 10 * timing.Heartbeat
	MaxCallTimeout = 7 * 24 * time.Hour
)

// MaxThreads is the most Config.Threads.
const MaxThreads = 4096

// Validate reports every fault of the settings, each on a line that names the field and what would be right.
func (c Settings) Validate() error {
	var errs faults.List
	errs.If(c.Threads < 0 || c.Threads > MaxThreads, "Threads is %d: give 1 to %d, or 0 for all cores", c.Threads, MaxThreads)
	errs.If(c.Reduction > Fast, "Reduction is %d: give Exact or Fast", c.Reduction)
	errs.If(c.Reshape > controller.Off, "Reshape is %d: give Full, Dataflow or Off", c.Reshape)
	errs.If(c.Zero < 0 || c.Zero > 2, "Zero is %d: give 1 or 2, or 0 for 2", c.Zero)
	errs.If(c.HelloTimeout < 0, "HelloTimeout is %v: give a positive time, or 0 for 30s", c.HelloTimeout)
	errs.If(c.MinWorkers < 0, "MinWorkers is %d: give at least 1, or 0 for 1", c.MinWorkers)
	errs.If(c.Stages < 0, "Stages is %d: give at least 1, or 0 for 1", c.Stages)
	errs.If(c.Detect < 0 || c.Detect > 0 && c.Detect < MinDetect || c.Detect > MaxDetect, "Detect is %v: give at least %v and at most %v, or 0 for no detection", c.Detect, MinDetect, MaxDetect)
	errs.If(c.CallTimeout > 0 && c.CallTimeout < MinCallTimeout || c.CallTimeout > MaxCallTimeout,
		"CallTimeout is %v: give at least %v and at most %v, 0 for %v, or -1 for never", c.CallTimeout, MinCallTimeout, MaxCallTimeout, timing.Call)
	errs.If(c.SkipBad && c.NoDigests, "SkipBad and NoDigests are set: without digests, a step could be made of two samples in one place; leave out NoDigests")
	if err := c.Keep.Validate(); err != nil {
		errs.Add(fmt.Errorf("Keep: %w", err))
	}
	return errs.Err()
}

// Reduction is how gradients are summed.
type Reduction uint8

// The values of Reduction.
const (
	Exact Reduction = iota // in an order that depends on the job only
	Fast                   // in the order in which they come
)

var reductionNames = []string{"exact", "fast"}

// String returns the text of flags, files and messages.
func (r Reduction) String() string { return reductionNames[r] }

// ParseReduction reads the text of a flag or a file.
func ParseReduction(text string) (Reduction, error) {
	i := slices.Index(reductionNames, text)
	if i < 0 {
		return 0, fmt.Errorf("%s: give exact or fast", faults.Value(text))
	}
	return Reduction(i), nil
}

// WithDefaults returns the settings of a run that begins with so many workers.
func (c Settings) WithDefaults(workers int) Settings {
	c.Program = cmp.Or(c.Program, "the program")
	c.Threads = cmp.Or(c.Threads, max(1, runtime.GOMAXPROCS(0)/workers))
	c.Stages = cmp.Or(c.Stages, 1)
	c.Mirrors = max(cmp.Or(c.Mirrors, 1), 0)
	c.MinWorkers = cmp.Or(c.MinWorkers, 1)
	c.Zero = cmp.Or(c.Zero, 2)
	c.HelloTimeout = cmp.Or(c.HelloTimeout, timing.Hello)
	c.CallTimeout = cmp.Or(c.CallTimeout, timing.Call)
	return c
}

// Reason says who asked a run to stop; it becomes stopped_by in summary.json.
type Reason string

const (
	Interrupt  Reason = "interrupt"  // Ctrl-C: exit 130
	Terminated Reason = "terminated" // SIGTERM or SIGHUP: exit 75
	Cancelled  Reason = "cancelled"  // the end of Serve's context: exit 130
	Stopped    Reason = "stopped"    // a command of another process: exit 1
)

// Config is what a session knows of its run and of its host.
type Config struct {
	Settings

	Workers   int       // number of workers that the run began with
	RunDir    string    // path of the run directory; "" for a run without files
	Shown     string    // the same, as the user knows it
	Clocks    ClockKind // of the devices that workers compute on
	Telemetry bool      // spans and measures are wanted
	CanStart  bool      // workers can be started while the run goes on
	Apart     bool      // each host is a machine of its own

	// Lease is how long a worker commits without hearing its host, which cannot know then whether another one leads. 0 means
	// forever: no other host can lead.
	Lease time.Duration

	// The term in which this one leads, the newest ballot and fill of that term before this
	// session, the host's name, and what the leader before has left; nil for a run that begins.
	Term, Attempt uint64
	Fills         int
	Leader        string
	Inherited     *Inherited

	Home    string       // the host where the user started the run, which gets the model; "" for a run on one host
	Large   int64        // see controller.Config
	Skipped []uint64     // samples that were skipped so far, each as often as it was
	First   id.Version   // of the first plan; zero for that of a job that begins
	Ring    control.Ring // the gossip ring
	NoRing  string       // why it is missing, where there should be one
}

// ClockKind says which clocks a run sets.
type ClockKind uint8

// The kinds of clocks.
const (
	NoClocks ClockKind = iota
	RealClocks
	EmulatedClocks
)

// Status is how a worker exited.
type Status struct {
	Code int    // exit status; -1 after a signal
	Text string // such as "exit status 3" or "signal: killed"

	// Panicked says that the program panicked, as far as its log tells. Other workers would do the same.
	Panicked bool

	// Fault says that the process exited by a fault of its own, such as a segmentation violation, and not by a signal from outside.
	Fault bool

	// Progress is what the worker had begun, as far as that is known.
	Progress progress.State

	Lost time.Time // since when its host is silent, where that is why the worker counts as exited
	Gone bool      // and the agent of that host has exited, so that it does not come back by itself
}

// OK reports whether the worker exited by itself and without an error.
func (s Status) OK() bool { return s.Code == 0 }

// Killed reports whether a signal from outside killed the worker.
func (s Status) Killed() bool { return s.Code < 0 && !s.Fault && !s.Panicked }

func (s Status) String() string { return s.Text }
