package control

import (
	"fmt"
	"time"

	"github.com/soliton-train/soliton/internal/net/auth"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/timing"
)

// Protocol is the version of the conversation.
const Protocol = 19

// Message is one of the types of this package that travel over a [Conn], by value. docs/wire.md lists them all.
type Message interface {
	kind() string
}

// Hello is a worker's first message.
type Hello struct {
	Protocol    int
	WorkerID    int
	Incarnation int
	PID         int
}

// Welcome is an agent's first message. It travels over the connection that the worker has inherited.
type Welcome struct {
	Key auth.Key // of the run, for links to other workers
}

// Beat says that the worker lives. A worker sends one right after Hello and then one
// every [timing.Heartbeat], from a goroutine that waits for nothing else, until it
// closes the connection. An agent with failure detection suspects a worker whose Beats are missing once it has said Hello.
type Beat struct {
	// Step is the newest that the worker has committed, and Layers how long passes take
	// it; both are left out where nothing is new. At most [MaxMeasured] are told.
	Step   int
	Layers []LayerTime
	// Links are how long its links were busy with what it sent since it told last, which
	// was Over nanoseconds before.
	Links []LinkTime
	Over  int64
	// Available is how many bytes its machine can give to programs, now and then; else 0.
	Available int64
	// Crowd is that of the machine, between hosts.
	Crowd timing.Crowd
	// Pace is how far it is in a step, nil where it is in none.
	Pace *Pace
	// Call is the call of user code that runs, nil where none has run for a heartbeat.
	Call *Call
	// Rejected is how many connections a worker or an agent has rejected so far, by auth.Cause; none where there were none.
	Rejected []int64
}

// Pace is how far a worker is in a step.
type Pace struct {
	Step    int
	Left    int   // pairs of a stage and a micro-batch that are not finished
	Ready   int   // those of them that could begin
	Running int   // passes
	Each    int64 // nanoseconds from the end of one to that of the next; 0: not known
	Stuck   int64 // nanoseconds for which a pass has run beyond what it should have taken
	Idle    int64 // nanoseconds for which it has had nothing left to do
}

// Call is a call of user code.
type Call struct {
	Kind   CallKind
	Layer  int    // of Forward and Backward, numbered in the model
	Sample int64  // index in the data set, of Sample
	Number uint64 // differs between two calls of a worker
	For    int64  // nanoseconds since it was called
	Waited int64  // of them, those in which the process waited for a processor, or was stopped
}

// CallKind is what user code is called for.
type CallKind uint8

// The kinds of calls.
const (
	NoCall       CallKind = iota
	CallJob               // make the job: open data, describe layers
	CallSample            // read a sample
	CallForward           // of a layer
	CallBackward          // of a layer
	CallLoss
	CallOnStep
	CallOnEnd
)

// Text names the call. layer is the name of its layer.
func (c Call) Text(layer string) string {
	switch c.Kind {
	case CallJob:
		return "the job"
	case CallSample:
		return fmt.Sprintf("Sample(%d)", c.Sample)
	case CallForward:
		return fmt.Sprintf("Forward of layer %q", layer)
	case CallBackward:
		return fmt.Sprintf("Backward of layer %q", layer)
	case CallLoss:
		return "the loss"
	case CallOnStep:
		return "OnStep"
	case CallOnEnd:
		return "OnEnd"
	}
	return ""
}

// MaxMeasured bounds the layers and the links of a [Beat].
const MaxMeasured = 4096

// LayerTime is how long the passes of one micro-batch through a layer take, in nanoseconds.
type LayerTime struct {
	Layer             int
	Forward, Backward int64
}

// LinkTime is how long a link was busy with what was sent to a worker, in nanoseconds.
type LinkTime struct {
	To    int
	Bytes int64
	Busy  int64
}

// Note tells people what is going on in a few words, such as
// "reading data" or "evaluating". It has no other effect.
type Note struct {
	Text string
}

// Ready says that the job is valid, its data are read and its numbers known.
// The fields of Job that are set by the agent are left out.
type Ready struct {
	Job  rundir.Job
	Data []rundir.DataFile // training data, then held-out data; at most MaxItems

	// Addr is where the worker listens for other workers, as package transport writes it; "" for a worker that is to be the only
	// one.
	Addr string

	// Layers are the layers of the model in order. They are what plans are
	// made of.
	Layers []Layer

	// CheckpointEvery is how often the run wants a checkpoint, 0 for none but the one of a
	// stopped run.
	CheckpointEvery time.Duration

	// CheckpointSteps has checkpoints made after multiples of so many steps instead; 0 means that CheckpointEvery counts.
	CheckpointSteps int

	// OnStep says that the program wants to be called for each committed step; see [Deliver].
	OnStep bool
}

// Layer describes one layer of a model.
type Layer struct {
	Name    string
	Tensors []int // elements of each parameter tensor, in order

	// Names and Shapes are those of the tensors in the file of the model. Checkpoints have them, so that they can be exported.
	Names  []string
	Shapes [][]int
}

// Start lets the worker train.
type Start struct {
	// RunDir is the absolute path of the run directory, where the worker
	// writes model.safetensors and config.json; "" for a run without files.
	RunDir string

	// Threads is the number of compute threads, at least 1.
	Threads int

	// Reduction is how gradients are summed: "exact", which "" means too, or
	// "fast".
	Reduction string

	// Zero is the stage of ZeRO: 1, or 2, which 0 means too.
	Zero int

	// NoDigests says that memory is trusted; all workers have the same.
	NoDigests bool

	// Verify is how many micro-batches a worker runs for each that it repeats in a spot check, on average; 0 means none.
	Verify int

	// Detect is how long the worker may go on committing without a Beat of its agent; 0
	// means for ever, as the agent sends none.
	Detect time.Duration

	// Joins says that the worker joins a run under way. Every other worker begins with its first [Order], which follows.
	Joins bool

	// Checkpoints says that the run makes them, in RunDir.
	Checkpoints bool

	// Eras are those of the run, so checkpoints are of the last one, and may be read of all. Without one, they are of the worker's job.
	Eras rundir.Eras

	// Shift is added to the number of each sample, where the run had another global batch before.
	Shift uint64

	// SkipBad says that samples that no worker can read are skipped, and Skipped has those that were, each as often as it was.
	SkipBad bool
	Skipped []uint64

	// TraceEvery has one of so many steps told of in Spans, and the first one, and those that a
	// recovery interrupts; 0 has nothing measured.
	TraceEvery int

	// Chaos lists faults in the grammar of package chaos. Each worker injects its own into itself.
	Chaos []string

	// Ring says how the worker becomes a member of the gossip ring.
	Ring Ring
}

// Ring is what a member of the gossip ring has to know.
type Ring struct {
	Job    string        // name of the ring, which keeps those of different runs apart
	Key    auth.Key      // of all members
	Seeds  []string      // addresses of members; none means that there is no ring
	Host   string        // the worker's, "" for the only one
	Detect time.Duration // budget
	Size   int           // how many members the ring is to have
}

// MaxMetrics bounds the metrics of a step, and those of an evaluation.
const MaxMetrics = 64

// Step is one committed step. Every worker sends it: all fields but MS, Time, Plan,
// Forwards and Backwards have the same bits in every worker's message for a step.
type Step struct {
	Step     int     // number of the step, from 1
	Loss     float64 // mean training loss
	LR       float64
	GradNorm float64 // before clipping
	Tokens   int64   // targets the loss was averaged over
	MS       float64 // wall time of the step, without evaluation
	Time     time.Time
	Plan     uint64             // Version.N of the worker's plan as the step ended
	ValLoss  *float64           // set where an evaluation followed the step
	Metrics  map[string]float64 // means of the evaluation besides; nil for none

	// TrainMetrics are the means of the step besides the loss; nil for none.
	TrainMetrics map[string]float64

	Left   bool // it has left with this step; ValLoss and Metrics are missing then
	Joined bool // it has joined with this step, and has its result from others; MS is missing then

	// Forwards and Backwards count what this worker has run in training so
	// far: (stage, micro-batch) pairs.
	Forwards, Backwards int64

	Reading int64 // nanoseconds since its last step that this worker spent reading samples, and not computing: of each lane its share
	Compute int64 // nanoseconds of the step in which this worker computed; 0: not measured

	// Reduced and Exchanged count the bytes of the operands that this worker has brought into
	// reductions and exchanges since it told of a step; 0: not measured.
	Reduced, Exchanged int64
}

// MaxSpans bounds the spans and the links of one message.
const MaxSpans = 1 << 12

// Spans tells what a worker did, where the agent wants to know: in a step after its Step, or
// for an order after its Applied.
type Spans struct {
	Trace   string // of the Query or the Order; "" for a step
	Step    int
	Plan    uint64 // Version.N of the plan of the step
	Spans   []Span // at most MaxSpans
	Links   []Traffic
	Dropped int // spans beyond MaxSpans
}

// Span is a stretch of time. What it is not about is -1.
type Span struct {
	Name                      string // see package trace
	Start, Took               int64  // nanoseconds since 1970, and nanoseconds
	Stage, Micro, Layer, Peer int
	Back                      bool  // a boundary tensor on its way back
	Bytes                     int64 // of the operand; 0: not known
	Lane                      int   // of the passes that the worker runs side by side
}

// Traffic is what a worker has sent to another one so far, in bytes of messages.
type Traffic struct {
	Worker int
	Sent   int64
}

// Output is text the program wants on its standard output. Only the first
// worker of the plan may send it. The agent shows what came before the view
// has closed when it closes, and everything else at once.
type Output struct {
	Text string
}

// Deliver has the worker call OnStep, which one worker at a time does. From its first Deliver on, a worker waits after
// each step that it has reported until that step is delivered, and answers every Step with [Delivered].
type Deliver struct {
	After int               // the newest step that is known to be delivered
	Files []rundir.LineFile // of the program's line writers, as that call left them
	Step  *Step             // to be delivered; nil: the next one follows
	Again bool              // the call may have been made before, by a process that ended before it said so
}

// Delivered says that OnStep has returned for all steps up to Step. It is durable when the next Deliver comes.
type Delivered struct {
	Step  int
	Files []rundir.LineFile // what the program's line writers have written so far
	Left  bool              // the worker leaves the run and makes no calls any more, not even one that it was asked for
}

// Save asks for a checkpoint at the next commit, or at the first one after for which no
// worker is still writing the one before.
type Save struct{}

// Saved says that the shards that the worker owned after a step are on disk. It comes before
// Done.
type Saved struct {
	Step          int
	Generation, N int    // version of the plan under which the step was committed
	Rule          string // the optimizer's, as package checkpoint names it
	File          []byte // a checkpoint.File, as JSON
	Began         int64  // when the state was captured, in nanoseconds since 1970
	Err           string // why there is no file, "" if there is one
}

// Unread says that the worker cannot read a sample of the run, and waits for a [BadSample] that says what is to become of it. It comes
// again until then. It also answers BadSample with TrySample; without a Text, the worker can read it, or has read it in this step.
type Unread struct {
	Sample uint64
	Skips  int    // samples that were skipped in its place before
	Index  int    // in the data
	Step   int    // that needs it
	Text   string // why it cannot be read
}

// BadSample says what a worker is to do with a sample that a worker cannot read.
type BadSample struct {
	Sample uint64
	Skips  int
	Do     string // TrySample, SkipSample or FailSample
}

// Values of [BadSample].Do.
const (
	TrySample  = "try"  // say in an Unread whether it can be read
	SkipSample = "skip" // no worker can read it, and the next one of the data takes its place
	FailSample = "fail" // another worker can read it
)

// Hold has the worker enter no commit until another one says that it may again: what the run has to write has no room.
type Hold struct{ On bool }

// Stop asks the worker to finish the step it is in, then to write its files
// and send Done with StoppedBy set to Reason. A worker that was in its last
// step sends Done as if it had not been asked.
type Stop struct {
	Reason string // becomes stopped_by in summary.json: "interrupt" or "terminated"
}

// Done says that training has ended and all files of the worker are
// written. Every worker sends it; all but Plan and Worker has the same bits in each,
// and ValLoss where a worker has joined after the newest evaluation.
// The agent writes summary.json from them. The worker goes on to answer queries
// until Release. Then the worker that the plan names (plan.Plan.Collector) goes on with the program's own
// end, and closes its connection after that; the others do at once.
type Done struct {
	Steps        int      // committed
	Loss         float64  // of the last step
	ValLoss      *float64 // of the newest evaluation, nil before the first
	ParamsSHA256 string   // lower-case hexadecimal
	StateSHA256  string
	StoppedBy    string // "" when all steps are done, else the Reason of Stop
	Result       []byte // of the last point, with which others can pass it
	Collector    int    // worker that wrote the model
	ModelDir     string // of the collector: where it wrote the model because the run directory does not take it; "" for there
	Plan         uint64 // Version.N of the worker's plan
	Worker       rundir.Worker
}

// Thaw is the Kind of a [Fault] that undoes the one before.
const Thaw = "thaw"

// Repaired says that a block of the worker's state was not as it had been
// written, and was restored from another worker. What had been computed with it
// is computed again. Several blocks that were found together have the same Step
// and Try.
type Repaired struct {
	Step   int    // whose commit it was found before
	Try    int    // of coming to that commit, from 1
	Layer  string // name
	Block  int    // of the layer, in the order of zero.Blocks
	Target string // own, mirror, copy or moment: what the block was to the worker
}

// Leave says that the worker was asked, by its operating system, to end: its state is to be handed over. A host says it when its
// workers have left; the leader answers with Leave when the host has no vote any more.
type Leave struct{}

// Fault announces that a fault is about to be injected into a worker. It is for measuring only.
type Fault struct {
	Kind   string // kill, freeze, thaw, ...
	Worker int    // into which; from a worker, it is the worker itself
	At     int64  // nanoseconds of CLOCK_MONOTONIC; 0 from a worker that will not die of it
	// Text is the element of Start.Chaos that is injected, "" if it is none of them. It is not injected into a later incarnation.
	Text string
}

// Add asks an agent, over the socket for commands, to start N more workers. It
// answers with Added.
type Add struct {
	N int
}

// Added says which workers begin, or in words why none does.
type Added struct {
	Workers []int
	Refusal string
}

// Inject has the agents of a run over several machines inject a fault into workers, each into those of its machine. The answer is
// the same, or Refused.
type Inject struct {
	Kind    string // kill, freeze, thaw, leave or slow
	Workers []int
	Factor  float64 // of the speed, for slow
	Stamp   bool    // the time is that from which recoveries from it are measured
}

// Refused is the answer to a command that was not carried out, and says in words why; each line is of one fault.
type Refused struct {
	Text string
}

// Asked passes a command that has come to the agent of another machine on: to the leader and, for Inject, to the hosts of the
// workers.
type Asked struct {
	ID      uint64 // of the question, for the one that asks
	Message []byte
}

// Answered is the answer to Asked.
type Answered struct {
	ID      uint64
	Message []byte
}

// Alive tells the hosts of a run over several machines how its processes can be reached, for their workers.json.
type Alive struct {
	Workers []rundir.Process
}

// Release lets a worker end that is done, or that the plan does without: no other
// worker needs it any more.
type Release struct{}

// FailKind says whose fault a failure is; the exit status follows from it.
type FailKind string

const (
	Usage     FailKind = "usage"      // flags or job are wrong: exit 2
	UserPanic FailKind = "user-panic" // user code panicked: exit 1, Stack is shown
	NoSample  FailKind = "no-sample"  // a sample cannot be read here: exit 1, unless another worker can read it
	Faulty    FailKind = "error"      // anything else, such as an unreadable file: exit 1
	NonFinite FailKind = "non-finite" // loss or gradient is not finite: exit 1
	Mismatch  FailKind = "mismatch"   // a micro-batch gave other results when it was repeated: exit 1
	Corrupt   FailKind = "corrupt"    // corrupted state that no worker has a good copy of: exit 1 if no other worker continues
	PeerLost  FailKind = "peer-lost"  // another worker cannot be reached: exit 1, unless the agent learns why that one is gone
	Help      FailKind = "help"       // --help was asked for: Text may be long, exit 0
)

// OfWorker reports whether the failure may be that of one worker, without which the run can continue.
func (k FailKind) OfWorker() bool {
	return k == Faulty || k == NoSample || k == PeerLost || k == Corrupt
}

// Failed is the last message of a worker that cannot go on.
type Failed struct {
	Kind  FailKind
	Text  string // one line that names the flag, field or file and what would be right
	Stack string // of a panic in user code, "" otherwise
	Step  int    // the step in which it happened, from 1; 0 before the first
	Exit  int    // with Usage: the status that the program chose for its exit, 1 to 255; 0 for none
}

func (Release) kind() string   { return "release" }
func (Hold) kind() string      { return "hold" }
func (Deliver) kind() string   { return "deliver" }
func (Delivered) kind() string { return "delivered" }
func (Save) kind() string      { return "save" }
func (Saved) kind() string     { return "saved" }
func (Unread) kind() string    { return "unread" }
func (BadSample) kind() string { return "bad-sample" }
func (Repaired) kind() string  { return "repaired" }
func (Leave) kind() string     { return "leave" }
func (Fault) kind() string     { return "harm" } // the wire keeps the first name
func (Spans) kind() string     { return "spans" }
func (Add) kind() string       { return "add" }
func (Added) kind() string     { return "added" }
func (Inject) kind() string    { return "inject" }
func (Refused) kind() string   { return "refused" }
func (Asked) kind() string     { return "asked" }
func (Answered) kind() string  { return "answered" }
func (Alive) kind() string     { return "alive" }

func (Hello) kind() string   { return "hello" }
func (Welcome) kind() string { return "welcome" }
func (Beat) kind() string    { return "beat" }
func (Note) kind() string    { return "note" }
func (Ready) kind() string   { return "ready" }
func (Start) kind() string   { return "start" }
func (Step) kind() string    { return "step" }
func (Output) kind() string  { return "output" }
func (Stop) kind() string    { return "stop" }
func (Done) kind() string    { return "done" }
func (Failed) kind() string  { return "failed" }
