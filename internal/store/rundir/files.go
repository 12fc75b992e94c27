package rundir

import (
	"encoding/json"
	"errors"
	"time"
)

// Job is job.json: everything that decides the result of a run, and what it
// ran on. The worker describes the job; the agent fills in the fields below
// "set by the agent".
type Job struct {
	Program     string          `json:"program"`      // base name of the program
	Args        []string        `json:"args"`         // the program's flags, as given
	Model       string          `json:"model"`        // name of the kind of model, such as "gpt"
	ModelConfig json.RawMessage `json:"model_config"` // what config.json will hold; null where the model has none
	Layers      int             `json:"layers"`       // layers of the model
	Parameters  int64           `json:"parameters"`   // parameters of the model
	Steps       int             `json:"steps"`        // steps of the whole run
	GlobalBatch int             `json:"global_batch"` // samples of a step
	MicroBatch  int             `json:"micro_batch"`  // samples of a micro-batch
	Seed        uint64          `json:"seed"`         // key of every random stream
	Optimizer   string          `json:"optimizer"`    // description with all its numbers
	Schedule    string          `json:"schedule"`     // description of the learning rate over the steps
	ClipNorm    float64         `json:"clip_norm"`    // 0: gradients are not clipped
	EvalEvery   int             `json:"eval_every"`   // steps between evaluations; 0: at the end only
	EvalSamples int             `json:"eval_samples"` // most samples of an evaluation; below 0: all
	InitFrom    string          `json:"init_from"`    // file or run the first parameters come from; "": made from the seed
	InitSHA256  string          `json:"init_sha256"`  // of that file; "" where there is none
	Samples     int64           `json:"samples"`      // samples of the training data
	DataFiles   int             `json:"data_files"`   // files of the training data, the first in data.json
	EvalFiles   int             `json:"eval_files"`   // files of the held-out data, the others in data.json
	DataSHA256  string          `json:"data_sha256"`  // over the training data
	EvalSHA256  string          `json:"eval_sha256"`  // over the held-out data; "" where there is none
	Kernel      string          `json:"kernel"`       // kernel path: avx512, avx2 or generic
	GoVersion   string          `json:"go_version"`   // runtime.Version of the worker
	Platform    string          `json:"platform"`     // GOOS/GOARCH of the worker

	InitOptimizer       string `json:"init_optimizer,omitempty"`        // file that the optimizer's state comes from; "": it begins as zeros
	InitOptimizerSHA256 string `json:"init_optimizer_sha256,omitempty"` // of that file
	InitUpdates         int    `json:"init_updates,omitempty"`          // that are in that state

	// Set by the agent.

	ProgramSHA256 string    `json:"program_sha256"` // of the executable file; "" where it could not be read
	Reduction     string    `json:"reduction"`      // exact or fast
	Zero          int       `json:"zero"`           // stage of ZeRO: 1 or 2
	Workers       int       `json:"workers"`        // worker processes at the start
	Stages        int       `json:"stages"`         // pipeline stages of the first plan
	Threads       int       `json:"threads"`        // compute threads of each worker
	Mirrors       int       `json:"mirrors"`        // replicas of each shard
	MinWorkers    int       `json:"min_workers"`    // fewest workers to train with
	Detect        string    `json:"detect"`         // failure-detection timeout, as of time.Duration; "0s" for none
	CallTimeout   string    `json:"call_timeout"`   // after which a call of user code counts as blocked, as of time.Duration; "0s" for never
	Respawn       bool      `json:"respawn"`        // failed workers are respawned
	NoDigests     bool      `json:"no_digests"`     // state has no digests
	Verify        int       `json:"verify"`         // micro-batches that a worker runs for each that it repeats in a spot check; 0: no spot checks
	Reshape       string    `json:"reshape"`        // what is rebalanced between steps: full, dataflow or off
	SkipBad       bool      `json:"skip_bad"`       // samples that no worker can read are skipped
	Keep          int       `json:"keep"`           // checkpoints that are kept: so many of the newest; 0: the default
	KeepEvery     string    `json:"keep_every"`     // and one for each such time, as of time.Duration; "" or "0s" for none
	KeepBest      string    `json:"keep_best"`      // and the one with the least of this: val_loss, loss or ""
	Checkpoints   string    `json:"checkpoints"`    // where they go beside the run directory; "" for nowhere
	Command       string    `json:"command"`        // PROGRAM as it was given, to resume the run; "" if it cannot be resumed
	Dir           string    `json:"dir"`            // working directory in which it was
	Python        string    `json:"python"`         // interpreter that was given for a Python program; "" for the default one
	Started       time.Time `json:"started"`        // when the agent made the run directory

	// Lineage is what the run was before it was resumed with something changed, the oldest first.
	Lineage []Ancestor `json:"lineage,omitempty" msgpack:"-"`
}

// DataFile is one file of the data, as a line of data.json.
type DataFile struct {
	Path   string `json:"path"`
	Size   int64  `json:"size"`   // bytes
	SHA256 string `json:"sha256"` // lower-case hexadecimal
}

// Metrics is one line of metrics.jsonl: one committed step. After a rollback
// a step appears again with a higher Plan, and its last line counts.
type Metrics struct {
	Step     int                `json:"step"`               // number of the step, from 1
	Loss     float64            `json:"loss"`               // mean training loss of the step's global batch
	LR       float64            `json:"lr"`                 // learning rate of the step
	GradNorm float64            `json:"grad_norm"`          // norm of the whole gradient before clipping
	Tokens   int64              `json:"tokens"`             // targets the step's loss was averaged over
	MS       float64            `json:"ms"`                 // wall time of the step, without evaluation
	Time     Time               `json:"time"`               // of the commit
	Workers  int                `json:"workers"`            // workers of the plan
	Plan     uint64             `json:"plan"`               // version of the plan the step ran under
	ValLoss  *float64           `json:"val_loss,omitempty"` // where the step was followed by an evaluation
	Metrics  map[string]float64 `json:"metrics,omitempty"`  // means of that evaluation besides

	TrainMetrics map[string]float64 `json:"train_metrics,omitempty"` // means of the step besides its loss
}

// Event is one line of events.jsonl: one change.
type Event struct {
	Time   Time   `json:"time"`
	Kind   string `json:"kind"`   // see package agent
	Worker int    `json:"worker"` // WorkerID, or -1 where the event is of the whole run
	Plan   uint64 `json:"plan"`
	Reason string `json:"reason"`         // one sentence
	Host   string `json:"host,omitempty"` // of kind lost: the host that was lost with the worker; of kind rejected: the one that rejected them

	Rejected map[string]int64 `json:"rejected,omitempty"` // of kind rejected: connections so far, by cause

	*Recovery // of kind recovered; its fields stand beside the others
	*Repair   // of kind repaired; the same
	*Clocking // of kind clocks; the same
}

// Clocking says which clocks were set.
type Clocking struct {
	Clocks   []Clock `json:"clocks"`             // none: they are left alone from now on
	Emulated bool    `json:"emulated,omitempty"` // the devices do not exist
	Joules   float64 `json:"joules"`             // drawn by the devices so far, as far as they tell

	AfterStep int `json:"after_step"` // committed before
	SinceStep int `json:"since_step"` // after which Joules began to count
}

// Clock is the clock of a device, and its highest frequency from now on.
type Clock struct {
	Device  string `json:"device"`
	MHz     int    `json:"mhz"`
	Workers []int  `json:"workers"` // that compute on it
}

// Repair says which block of a worker's state was altered and restored.
type Repair struct {
	Layer  string `json:"layer"`
	Block  int    `json:"block"`  // of the layer: 4,096 elements of a tensor, or its rest
	Target string `json:"target"` // what the block was to the worker: own, mirror, copy or moment
}

// Plan is one line of plans.jsonl: one plan that went live.
type Plan struct {
	Time   Time            `json:"time"`
	Event  string          `json:"event"`  // what made it necessary, such as "start"
	Reason string          `json:"reason"` // one sentence
	Plan   json.RawMessage `json:"plan"`   // as package plan writes it
}

// Skip is one line of skips.jsonl: a sample that no worker could read, in one place of the run. The next sample of the data takes its
// place, or the one after that if the sample has two lines, and so on.
type Skip struct {
	Sample uint64 `json:"sample"` // number in the run, counted over all steps from 0
	Index  int    `json:"index"`  // in the data of the sample that was tried; -1 where that is not known
	Step   int    `json:"step"`   // that needs it
	Time   Time   `json:"time"`
	Reason string `json:"reason"` // why it could not be read
}

// Delivery is one line of deliveries.jsonl: the newest step for which OnStep has returned, and the worker that calls it from then on.
type Delivery struct {
	Step        int        `json:"step"`
	Worker      int        `json:"worker"`
	Incarnation int        `json:"incarnation"`
	Again       bool       `json:"again,omitempty"` // the next step may have been delivered, too, by a process that has ended
	Files       []LineFile `json:"files,omitempty"` // of the program's line writers
}

// UnmarshalJSON refuses a delivery without a step: step 0 would have all calls repeated.
func (d *Delivery) UnmarshalJSON(text []byte) error {
	type plain Delivery
	v := struct {
		*plain
		Step *int `json:"step"`
	}{plain: (*plain)(d)}
	if err := json.Unmarshal(text, &v); err != nil {
		return err
	}
	if v.Step == nil {
		return errors.New("a delivery without a step")
	}
	d.Step = *v.Step
	return nil
}

// LineFile is what a line writer has written.
type LineFile struct {
	Path string `json:"path"` // as the program gave it
	Size int64  `json:"size"` // bytes; what is behind them is of a call that did not return
}

// Workers is workers.json, which is there while the run is: how to reach its processes.
type Workers struct {
	Agent   string    `json:"agent"`          // path of the socket where the agent takes commands
	Host    string    `json:"host,omitempty"` // of this run directory, where each host has one
	Workers []Process `json:"workers"`
}

// Process is a worker that lives.
type Process struct {
	ID          int    `json:"id"`
	Incarnation int    `json:"incarnation"`
	PID         int    `json:"pid"`
	Host        string `json:"host,omitempty"` // on which it runs, where there are several
	Ring        string `json:"ring"`           // its state in the gossip ring: alive, suspect, dead or left; "" while it is unknown

	// Call is the call of user code that should have returned, and Since when it began.
	Call  string `json:"call,omitempty"`
	Since *Time  `json:"since,omitempty"`
}

// Time is a point in time as the line files hold it: RFC 3339 with
// milliseconds, in UTC.
type Time struct{ time.Time }

const timeLayout = "2006-01-02T15:04:05.000Z07:00"

// MarshalJSON implements [json.Marshaler].
func (t Time) MarshalJSON() ([]byte, error) {
	return []byte(`"` + t.UTC().Format(timeLayout) + `"`), nil
}

// Summary is summary.json.
type Summary struct {
	Steps           int        `json:"steps"`         // committed
	Loss            float64    `json:"loss"`          // of the last step
	ValLoss         *float64   `json:"val_loss"`      // of the newest evaluation; null before the first
	ParamsSHA256    string     `json:"params_sha256"` // "" where the run ended before it was taken
	StateSHA256     string     `json:"state_sha256"`
	DataSHA256      string     `json:"data_sha256"`
	ModelHost       string     `json:"model_host,omitempty"` // host that has the model; "" for a run on one host
	Seconds         float64    `json:"seconds"`              // from the start of training until all files were written
	TokensPerSecond float64    `json:"tokens_per_second"`    // tokens of all steps by the sum of the steps' wall times
	WorkersStarted  int        `json:"workers_started"`
	WorkersLost     int        `json:"workers_lost"`
	WorkersJoined   int        `json:"workers_joined"`
	Reduction       string     `json:"reduction"`
	Rollbacks       int        `json:"rollbacks"`
	StoppedBy       string     `json:"stopped_by"` // "" when all steps are done
	Workers         []Worker   `json:"workers"`
	Recoveries      []Recovery `json:"recoveries"`
}

// Worker is what one worker did, as summary.json tells it.
type Worker struct {
	ID          int   `json:"id"`
	Incarnation int   `json:"incarnation,omitempty"` // above 0 for a respawned worker
	Stages      []int `json:"stages"`
	Layers      []int `json:"layers"`      // layers whose parameters the worker held
	Forwards    int64 `json:"forwards"`    // (layer range, micro-batch) pairs run forward in training
	Backwards   int64 `json:"backwards"`   // the same backward
	BytesSent   int64 `json:"bytes_sent"`  // to other workers
	ParamBytes  int64 `json:"param_bytes"` // bytes of parameters held
	StateBytes  int64 `json:"state_bytes"` // bytes of optimizer moments held

	// Times are the durations of a micro-batch's passes that the last plans were made with; left
	// out for a worker that was lost, and in a run too short to measure them.
	Times []LayerTime `json:"times,omitempty"`
}

// LayerTime is how long the passes of one micro-batch through a layer take.
type LayerTime struct {
	Layer      int     `json:"layer"`
	ForwardMS  float64 `json:"forward_ms"`
	BackwardMS float64 `json:"backward_ms"`
}

// Recovery is the account of one recovery, in milliseconds. The phases follow
// one another and together are TotalMS.
type Recovery struct {
	Step   int    `json:"step"`    // in which the fault came
	Cause  string `json:"cause"`   // of the first death, and of others that came before the end of the recovery
	DiedAt string `json:"died_at"` // source of the time of the death: kill, reap or silence

	DetectMS float64 `json:"detect_ms"` // from the death until the agent knew of it
	QueryMS  float64 `json:"query_ms"`  // until all had said what they have
	PlanMS   float64 `json:"plan_ms"`   // until there was a plan
	AgreeMS  float64 `json:"agree_ms"`  // until it was agreed
	EditMS   float64 `json:"edit_ms"`   // until the slowest worker had applied it
	ResumeMS float64 `json:"resume_ms"` // until the last had a task of it, or none left
	TotalMS  float64 `json:"total_ms"`

	// UpdateMS is the part of EditMS until the last worker had updated its shards by the step that was committed before: work
	// that is left of that step, and no more of it than without the fault.
	UpdateMS float64 `json:"update_ms"`

	// StallMS is that step's time less the median of the ten before it. It is null while it is unknown: in events.jsonl,
	// which has the recovery before its step is committed, and where no step was committed before.
	StallMS *float64 `json:"stall_ms"`

	// RecomputedMicrobatches counts the recomputed (stage, micro-batch) pairs that the failed
	// workers are known to have begun.
	RecomputedMicrobatches int `json:"recomputed_microbatches"`
	LinksOpened            int `json:"links_opened"`
}
