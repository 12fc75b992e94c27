package control

// Watch asks a worker for a [Timeline] of each step whose number Every divides. 0 asks for no more.
type Watch struct {
	Every int
}

// Timeline says what a worker did in a step. All times but Began are microseconds since then.
type Timeline struct {
	Step   int
	Began  int64 // microseconds since 1970
	Commit int64 // when it entered the commit
	End    int64 // of the step
	Passes []Pass
	Cut    bool // there were more than MaxPasses
}

// Pass is one pass of a micro-batch through the layers from Layer on.
type Pass struct {
	Backward     bool
	Layer, Micro int
	From, To     int64
	Wait         int64 // of it, for parameters that had not come
	Lane         int   // of the passes that the worker runs side by side
}

// MaxPasses bounds Timeline.Passes.
const MaxPasses = 4096

func (Watch) kind() string    { return "watch" }
func (Timeline) kind() string { return "timeline" }
