package comm

type Group struct{}
type Op uint8

func (g *Group) end(err error, rank int, remote bool) {}
func (g *Group) linkLost(s Session, err error)        {}
func versionOf(k Key) Version                         { return Version{uint64(k.Lo), uint64(k.Hi)} }
func groupOf(k Key) uint16                            { return uint16(uint32(k.Layer) >> 16) }
