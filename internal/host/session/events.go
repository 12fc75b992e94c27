package session

import (
	"time"

	"github.com/soliton-train/soliton/internal/controller"
	"github.com/soliton-train/soliton/internal/host/session/skips"
	"github.com/soliton-train/soliton/internal/id"
	"github.com/soliton-train/soliton/internal/net/control"
	"github.com/soliton-train/soliton/internal/net/gossip"
	"github.com/soliton-train/soliton/internal/observe/trace"
	"github.com/soliton-train/soliton/internal/observe/view"
	"github.com/soliton-train/soliton/internal/plan"
	"github.com/soliton-train/soliton/internal/store/checkpoint"
	"github.com/soliton-train/soliton/internal/store/rundir"
	"github.com/soliton-train/soliton/internal/timing"
)

// An Event is something that has happened. A Worker of type int is a place: the position of the worker's process among all that
// the session was given by [New] and, after those, by [WorkerStarted].
type Event any

// Events of workers.
type (
	// Received is a message of a worker.
	Received struct {
		Worker  int
		Message control.Message
	}
	// ConnClosed says that a connection is over, or was never made. What a worker has sent is received before.
	ConnClosed struct {
		Worker int
		Err    error
	}
	// WorkerExited says that a process has exited.
	WorkerExited struct {
		Worker int
		Status Status
	}
	// WorkerHalted says that a signal such as SIGSTOP has stopped a process, which comes again when it is still stopped after
	// [timing.Halt], or that it was continued.
	WorkerHalted struct {
		Worker  int
		Stopped bool
		Frozen  bool          // by no signal: none of its threads runs
		For     time.Duration // since it was stopped
	}
	// WorkerRuns says that a silent worker is not stopped: its process runs or waits for a processor. It comes again as long as that lasts.
	WorkerRuns struct{ Worker int }
	// WorkerStarted answers [StartWorker]. With an error, the worker has no place.
	WorkerStarted struct {
		Worker plan.Worker
		Err    error
	}
	// Fenced answers [FenceWorker]: the process of a worker has another place, for its next session.
	Fenced struct {
		Worker int // the fenced one
		As     plan.Worker
	}
	// Gossip is what the gossip ring says of a worker.
	Gossip struct {
		Worker plan.Worker
		State  gossip.State
		By     string // the member that cannot reach it, in words, while it is suspected or taken for dead
	}
	// FaultStamped is the time at which a fault was injected into a worker, from which its recovery is measured; zero takes it back.
	FaultStamped struct {
		Worker int // -1: the newest incarnation of ID
		ID     int
		At     time.Time
	}
	// FaultInjected says that a fault of the schedule was injected, and must not be injected again.
	FaultInjected struct{ Fault string }
)

// Events of the user and of other hosts.
type (
	// StopAsked asks the run to stop: at the next commit the first time, at once the second time.
	StopAsked struct{ Reason Reason }
	// AddWorkers asks for more workers; [AnswerAdd] comes.
	AddWorkers struct{ N int }
	// WatchAsked says whether timelines are wanted.
	WatchAsked struct{ On bool }
	// Noted is to be kept in the records.
	Noted struct{ Text string }
	// Rejected says how many connections the agent of a host has rejected so far, by auth.Cause.
	Rejected struct {
		Host   string
		Counts []int64
	}
	// HostBack says that a host is linked of which no worker is in the run. Workers is how many it brings; 0 means those that
	// were lost with it.
	HostBack struct {
		Host    string
		Workers int
	}
)

// Events of time.
type (
	// AlarmDue says that the time of [Session.Alarm] has come.
	AlarmDue struct{}
	// WatchTick has the session look for missed heartbeats. It comes every [timing.Policy].Watch. Due is when it was meant to come,
	// and Crowd is that of the leader's machine.
	WatchTick struct {
		Due   time.Time
		Crowd timing.Crowd
	}
)

// Events of what the shell has done.
type (
	// Agreed says that a proposed plan is in the log.
	Agreed struct {
		Version  id.Version
		Proposed time.Time
	}
	// Balanced answers [Balance].
	Balanced struct{ controller.Balanced }
	// SkipAgreed says that a sample that no worker can read is skipped, as the log says.
	SkipAgreed struct{ skips.Question }
	// FileFailed says that a file of the run directory could not be written.
	FileFailed struct{ Err error }
	// DiskFull says that the disk has no room for what must be written, or does not take it for another cause that may pass: it waits for
	// [RetryFiles].
	DiskFull struct{ Err error }
	// DiskRoom answers RetryFiles: nothing waits any more. Else DiskFull comes again.
	DiskRoom struct{}
	// DirRemoved says that the run directory was removed, and with it the checkpoints, and whether it is there again.
	DirRemoved struct {
		Err         error
		Checkpoints bool
	}
	// CheckpointCommitted answers [CommitCheckpoint]; Err says why there is no checkpoint.
	CheckpointCommitted struct {
		Step int
		Err  error
	}
	// CheckpointsPruned follows CheckpointCommitted, when old checkpoints are removed.
	CheckpointsPruned struct{ Err error }
	// Archived says that a checkpoint is at the target of the run, or why it is not yet; step 0 is the claim of it.
	Archived struct {
		Step int
		Err  error
	}
	// CheckpointVerified answers [VerifyCheckpoint].
	CheckpointVerified struct {
		Propose Propose
		Step    int      // of the newest checkpoint that is whole; 0 if there is none
		Refused []string // why newer ones are not
		Err     error    // of the file system
	}
	// ClocksSet says that clocks were set or, without Settings, why none will be.
	ClocksSet struct {
		Reason   string
		Settings []rundir.Clock
		Lowered  map[id.WorkerID]float64 // how many times as long workers on a lowered clock may take, at least 1
		Raised   []id.WorkerID           // workers on a clock above the one it was found at
		Shares   map[id.WorkerID]float64 // of the speed as found
		Joules   float64
	}
	// Metered is what devices do.
	Metered struct{ Devices []trace.Device }
)

// An Effect is something to do. Effects of one event are in the order in which they are to be done: first what other processes
// wait for, then files and views.
type Effect any

// Effects on workers.
type (
	// Send sends a message to a worker.
	Send struct {
		Worker  int
		Message control.Message
	}
	// Kill kills a worker.
	Kill struct {
		Worker int
		Stacks bool // it writes its stacks into its log before
	}
	// Fence kills a worker of a host that may come back later, as soon as it is there.
	Fence struct{ Worker int }
	// FenceWorker ends the session of a worker, and has its process continue as another incarnation; Fenced comes.
	FenceWorker struct {
		Worker int
		As     plan.Worker
	}
	// StartWorker starts a process; WorkerStarted comes.
	StartWorker struct{ Worker plan.Worker }
)

// Effects on the log and on the controller.
type (
	// Propose puts a plan into the log; Agreed comes.
	Propose struct {
		Order  control.Order
		Reason string
	}
	// ProposeSkip puts into the log that a sample is skipped; SkipAgreed comes.
	ProposeSkip struct{ skips.Question }
	// Balance has a long search done beside the session; Balanced comes.
	Balance struct{ controller.Balance }
)

// Effects on files.
type (
	// WriteJob writes job.json and data.json.
	WriteJob struct {
		Job  rundir.Job
		Data []rundir.DataFile
	}
	// WritePlan appends to plans.jsonl.
	WritePlan struct{ Plan rundir.Plan }
	// WriteMetrics appends to metrics.jsonl.
	WriteMetrics struct{ Metrics rundir.Metrics }
	// WriteDelivery appends to deliveries.jsonl.
	WriteDelivery struct{ Delivery rundir.Delivery }
	// WriteSkip appends to skips.jsonl.
	WriteSkip struct{ Skip rundir.Skip }
	// WriteEvent appends to events.jsonl.
	WriteEvent struct{ Event rundir.Event }
	// WriteSummary writes summary.json. Elsewhere is where the model was written because the run directory does not take it; records
	// that it does not take follow.
	WriteSummary struct {
		Summary   rundir.Summary
		Elsewhere string
	}
	// WriteWorkers writes workers.json.
	WriteWorkers struct{ Alive []rundir.Process }
	// RetryFiles writes what has waited for room; DiskRoom or DiskFull comes.
	RetryFiles struct{}
	// DropCheckpoints removes unfinished checkpoints up to a step.
	DropCheckpoints struct{ Step int }
	// ArchiveCheckpoint has a checkpoint copied to the target of the run, in the background; Archived comes. Step 0 has the run claim
	// the target. From is the step after which this start of the run began.
	ArchiveCheckpoint struct {
		Step, From int
		Job        rundir.Job
		Data       []rundir.DataFile
	}
	// CommitCheckpoint makes a checkpoint whole; CheckpointCommitted comes, and then CheckpointsPruned. Writers are the workers
	// that wrote its files, by their places.
	CommitCheckpoint struct {
		Manifest checkpoint.Manifest
		Writers  []int
	}
	// VerifyCheckpoint reads the checkpoint that a plan begins from; CheckpointVerified comes.
	VerifyCheckpoint struct {
		Propose Propose
		Of      rundir.Eras // whose checkpoint it is
	}
)

// Effects on the user's side.
type (
	// Show shows an event.
	Show struct{ Event view.Event }
	// CloseView ends the view.
	CloseView struct{}
	// Output prints a text of the program, once the view is closed.
	Output struct{ Text string }
	// AnswerAdd answers AddWorkers.
	AnswerAdd struct {
		IDs     []int
		Refusal string // "" where the workers are being started
	}
)

// Effects on telemetry.
type (
	// BeginTrace names the run to telemetry.
	BeginTrace struct {
		Run     trace.Run
		Program string
	}
	// WriteSpans hands spans on.
	WriteSpans struct{ Spans []trace.Span }
	// Measure hands a measure on.
	Measure struct{ Measure trace.Measure }
)

// Effects on the clocks of devices.
type (
	// ObserveStep asks whether clocks are to be set after a step.
	ObserveStep struct {
		Plan      plan.Plan
		Profile   plan.Profile            // from which plans are made
		Under     map[id.WorkerID]float64 // how many times as long each worker takes at its present clock
		Seconds   float64
		Processes map[int]int
		Changes   uint64 // of clocks before it
	}
	// ReleaseClocks restores lowered clocks, since another plan is live.
	ReleaseClocks struct{ Version id.Version }
	// DeviceUsed lets an emulated device have computed and waited, in seconds.
	DeviceUsed struct {
		Worker     int
		Busy, Idle float64
	}
)

// outbox collects the effects of an event.
type outbox struct{ urgent, other []Effect }

func (o *outbox) take() []Effect {
	all := append(o.urgent, o.other...)
	*o = outbox{}
	return all
}

// first does what other processes wait for.
func (s *Session) first(effects ...Effect) { s.out.urgent = append(s.out.urgent, effects...) }

// then does what only this host needs: files, views, searches.
func (s *Session) then(effects ...Effect) { s.out.other = append(s.out.other, effects...) }

func (s *Session) send(w *worker, m control.Message) { s.first(Send{w.place, m}) }
