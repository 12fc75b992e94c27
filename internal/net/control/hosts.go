package control

import (
	"github.com/soliton-train/soliton/internal/platform/progress"
	"github.com/soliton-train/soliton/internal/store/rundir"
)

// Messages between hosts.

// Host is what an agent says first to the one that leads: which of the run's hosts
// it is.
type Host struct {
	Protocol int
	Host     int
	Server   string        // its part in the agreement
	Link     string        // where others reach it: another one means that another agent has taken its place
	Records  []rundir.Mark // of its copies, where it has a run directory of its own
}

// Enter is what a host says first that is not one of the run's yet, or no longer at the addresses that they know.
type Enter struct {
	Protocol int
	Host     Member
}

// Entered answers Enter. A leader says which host it is from now on; another host only which host leads, as far as it knows.
type Entered struct {
	Host   int // -1: ask Leader, or ask again
	Leader int // -1 if not known
	Hosts  []Member
}

// Member is a host of a run.
type Member struct {
	Name    string
	Agree   string // HOST:PORT of its part in the agreement
	Link    string // where other hosts reach it
	First   []int  // the workers with which the run began here
	Workers int    // that are started here when it enters
}

// Copy brings such a host what the leader has written.
type Copy rundir.Part

// Shown brings such a host what people are shown of the run, in a form that only launchers read.
type Shown struct {
	Data []byte
}

// Survey asks a host with a run directory of its own which checkpoints of a run are there; Surveyed answers it. IDs are those of
// what the leader does.
type Survey struct {
	ID uint64
	Of rundir.Eras
}

// Surveyed says what the host has of its newest checkpoints.
type Surveyed struct {
	ID    uint64
	Found []Holding
	Err   string // why that is not known; "" if it is
}

// Holding is what a host has of one checkpoint.
type Holding struct {
	Manifest []byte // encoded
	Has      []bool // by the files of the manifest
}

// Keep asks such a host to have files of a checkpoint; Kept answers it.
type Keep struct {
	ID       uint64
	Manifest []byte
	Files    []Wanted
	Verify   bool // read those that are there
	Commit   bool // write the manifest when all files are there
	Prune    bool // and remove older checkpoints
}

// Wanted is a file of a checkpoint that a host is to have.
type Wanted struct {
	File int      // of the manifest
	From []string // hosts that have it
}

// Kept says that the host has the files, or why not.
type Kept struct {
	ID  uint64
	Err string
}

// Drop asks such a host to remove the parts of checkpoints up to a step that were never finished.
type Drop struct {
	Step int
}

// Fetch asks another host, over a connection for that alone, for a file of a checkpoint, or of the data, from an offset on; a Part
// answers it.
type Fetch struct {
	Protocol int
	Step     int
	File     string
	SHA256   string // of a file of the data that it has listed; "" for one of a checkpoint
	At       int64
}

// Part is what comes next of the file; nothing at its end.
type Part struct {
	Data []byte
	Err  string // why the file cannot be read; "" if it can
}

// Upload asks another host, over a connection for that alone, to copy files of a checkpoint to the target of the run. Uploaded answers it,
// for each file and while it takes long.
type Upload struct {
	Protocol int
	Step     int
	Prefix   string // of the names at the target
	Files    []Uploading
}

// Uploading is a file to be copied.
type Uploading struct {
	Name   string
	SHA256 string
}

// Uploaded says that a file is at the target, or why not; without a name, that the host is at work.
type Uploaded struct {
	Name string
	Err  string // why it is not there; "" if it is
	Over bool   // the last answer
}

// ReadLog asks an agent for the logs of workers on a host: its own, or one that it asks in turn, over a connection for that alone.
// Logged answers it.
type ReadLog struct {
	Protocol            int
	Host                string // "": which logs are on the other hosts
	Worker, Incarnation int    // Worker -1: which logs are there
	At                  int64  // byte from which on to read
}

// Logged says which logs there are, or what one has from ReadLog.At on; nothing at its end.
type Logged struct {
	Logs []LogFile // at most MaxLogs
	Data []byte    // at most MaxLogged
	Err  string    // why not; "" if it could be read
}

// LogFile is the log of a worker's session.
type LogFile struct {
	Host                string
	Worker, Incarnation int
	Size                int64
}

// Bounds of a Logged.
const (
	MaxLogs   = 4096
	MaxLogged = 256 << 10
)

// Lead is the answer to Host: the leader's term, the newest step of its records, and the plan of that step. The host sends all
// that it has of its workers since then, and then Told.
type Lead struct {
	Term uint64
	Plan uint64
	Step int
}

// Told says that the host has sent all that was before, and that what follows
// happens now.
type Told struct{}

// Relayed is a message of a worker or to it, on its way between agents.
type Relayed struct {
	Worker, Incarnation int
	Message             []byte // by Marshal
}

// Closed says that a worker's connection with its agent has ended.
type Closed struct {
	Worker, Incarnation int
}

// Exited says that a worker's agent has reaped it.
type Exited struct {
	Worker, Incarnation int
	Code                int
	Text                string
	Panicked, Fault     bool
	Progress            progress.State
	Last                string // lines that it printed
}

// Halted says that a signal such as SIGSTOP has stopped a worker's process, which comes again when it is still stopped after
// [timing.Halt], or that the process was continued.
type Halted struct {
	Worker, Incarnation int
	Stopped             bool
	Frozen              bool  // by no signal: none of its threads runs, as under a debugger
	For                 int64 // nanoseconds since it was stopped
}

// Runs says that a worker which is silent is not stopped: a thread of its process runs or waits for a processor. It comes again as long as
// that lasts.
type Runs struct {
	Worker, Incarnation int
}

// Begin asks the agent of a host to start a worker. What comes of it is told as of any
// worker; where none came to be, that is an Exited.
type Begin struct {
	Worker, Incarnation int
}

// Kill asks a worker's agent to kill it.
type Kill struct {
	Worker, Incarnation int
	Stacks              bool // it writes its stacks into its log before
}

// Fence ends the session of a worker, without which the run continues. Its process keeps its connection, on which it says Hello as
// incarnation Next and then nothing more of the session before.
type Fence struct {
	Worker, Incarnation int
	Next                int // incarnation
}

func (Host) kind() string     { return "host" }
func (Enter) kind() string    { return "enter" }
func (Entered) kind() string  { return "entered" }
func (Copy) kind() string     { return "copy" }
func (Shown) kind() string    { return "shown" }
func (Survey) kind() string   { return "survey" }
func (Surveyed) kind() string { return "surveyed" }
func (Keep) kind() string     { return "keep" }
func (Drop) kind() string     { return "drop" }
func (Kept) kind() string     { return "kept" }
func (Fetch) kind() string    { return "fetch" }
func (Part) kind() string     { return "part" }
func (Upload) kind() string   { return "upload" }
func (Uploaded) kind() string { return "uploaded" }
func (ReadLog) kind() string  { return "readlog" }
func (Logged) kind() string   { return "logged" }
func (Lead) kind() string     { return "lead" }
func (Told) kind() string     { return "told" }
func (Relayed) kind() string  { return "relayed" }
func (Closed) kind() string   { return "closed" }
func (Exited) kind() string   { return "exited" }
func (Halted) kind() string   { return "halted" }
func (Runs) kind() string     { return "runs" }
func (Begin) kind() string    { return "begin" }
func (Kill) kind() string     { return "kill" }
func (Fence) kind() string    { return "fence" }
