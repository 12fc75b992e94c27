package control

// Messages about data files that are not on every machine of a run.

// Bounds of what travels about data files.
const (
	MaxPattern  = 4096 // bytes of a pattern or a path
	MaxPatterns = 1024 // patterns of a Sources
	MaxListed   = 256  // files of a Listed or Got
)

// Sources says by which patterns the job of a worker has found its data on this machine. Other machines may have these files.
type Sources struct {
	Folder   string // in which relative patterns count
	Patterns []string
}

// Lacks asks the agent for the files of a pattern that matches none on this machine. Got answers it.
type Lacks struct {
	ID      uint64
	Pattern string
}

// Got says where copies of the files are, or of some of them, or why there are none.
type Got struct {
	ID    uint64
	Files []GotFile // at most MaxListed
	More  bool      // another Got follows
	None  bool      // no other machine has them
	Err   string    // why not: which machines were asked, or what failed; "" if all went well
}

// GotFile is a file of another machine with its copy on this one.
type GotFile struct {
	Path string // as people name it
	Size int64
	Copy string
}

// List asks another host, over a connection for that alone, which files a pattern of the run's data matches there. Listed answers it.
type List struct {
	Protocol int
	Pattern  string
	From     int // the first file to list
}

// Listed says which files there are from List.From on.
type Listed struct {
	Has   Supply
	Files []DataFile // at most MaxListed; none if they have yet to be read
	More  bool       // others follow
	Err   string     // why they cannot be listed; "" if they can
}

// DataFile is a file of the data. A Fetch names it by its SHA-256.
type DataFile struct {
	Path   string // as people name it
	Size   int64
	SHA256 string
}

// Supply says what a host has of a pattern.
type Supply int

// What a host can have.
const (
	Lacking  Supply = iota // nothing
	Having                 // the files
	Opening                // not known yet: its workers still open their data
	Stranded               // the same, and they wait for other files themselves, which no machine sends
)

func (Sources) kind() string { return "sources" }
func (Lacks) kind() string   { return "lacks" }
func (Got) kind() string     { return "got" }
func (List) kind() string    { return "list" }
func (Listed) kind() string  { return "listed" }
